from tests.tensorflow import models
from tests.tensorflow.plans import *
from tests.tensorflow.training import *
import pytest, time

@pytest.mark.parametrize("name", "chain dropout_chain residual_net unet text_lstm text_attention two_by_two transfer three_deep siamese".split())
def test_all(name):
    m = getattr(models, name)()
    print(labels(m))
    o = optimized_between_cuts(m)
    print([ (s.start, s.stop, s.mode.value) for s in o.memsaver_plan.segments])
    assert_trains_alike(m, o)
