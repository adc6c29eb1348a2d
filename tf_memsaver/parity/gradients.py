"""The names that gradients have in the plain step, where they enter a replay, leave it, or become terms of sums."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.devices import has_gpu
from tf_memsaver.compat.graphs import place_of
from tf_memsaver.compat.tapes import record_operation, stop_recording
from tf_memsaver.parity.gates import Gates, after, is_of_shapes
from tf_memsaver.parity.grappler import (
    ADDITIONS,
    CROSSENTROPIES,
    ELEMENT_BY_ELEMENT,
    KEPT_IDENTITY,
    KERNEL_GRADIENTS,
    MERGING_SHAPES,
    PASSED_STRAIGHT,
    RANKS_WITH_LAYOUTS,
    READS_INPUT,
    READS_OUTPUT,
    SHAPED_LIKE_FIRST,
)
from tf_memsaver.parity.names import plain_name
from tf_memsaver.parity.symbols import makes_symbols, symbol_of
from tf_memsaver.tfgraph.emission import ends_segment
from tf_memsaver.tfgraph.operations import has_custom_gradient

_ARRIVED, READY, _TERM = "arrived", "ready", "term"
"""Names of the copies of gradients that enter and leave a replay, and of tensors that pass under another name."""
_COPY = re.compile(rf"/({_ARRIVED}|{READY}|{_TERM})(_\d+)?$")

_GRADIENT_FACTORS = (READS_INPUT | READS_OUTPUT) - KERNEL_GRADIENTS
"""Operations whose gradient is a product of the one that arrives and what is computed of their operand or result."""

_PRODUCT_GRADIENTS = ELEMENT_BY_ELEMENT - ADDITIONS - KERNEL_GRADIENTS | _GRADIENT_FACTORS
"""Operations whose gradient is a product of the one that arrives and others."""

RENAMED = ("IdentityN", "Placeholder")
"""Kinds of operations that hand a gradient over under a name of their own."""


def is_ready(operation: tf.Operation) -> bool:
    """Whether an operation hands on a gradient of a replay once the others are there, too."""
    copy = _COPY.search(operation.name)
    return copy is not None and copy[1] == READY


def maker_of(tensor: tf.Tensor) -> tf.Operation:
    """Return the operation that made a tensor, before it was passed on unchanged: by an addition's gradient, too."""
    source: tf.Tensor | None = tensor
    while source is not None:
        tensor = source
        operation = tensor.op
        if operation.type in ("Identity", "IdentityN"):
            source = operation.inputs[tensor.value_index]
        elif operation.type in (KEPT_IDENTITY, "Sub") and _COPY.search(operation.name):
            source = operation.inputs[0]
        else:
            source = _before_addition(tensor) if _is_of_sum(operation) else _before_reshapes(tensor)
    return tensor.op


def before_additions(tensor: tf.Tensor) -> tf.Tensor:
    """Return the gradient that those of additions passed on unchanged, or the one that is given if there are none."""
    return _before_additions(tensor)[0]


def _before_additions(tensor: tf.Tensor) -> tuple[tf.Tensor, list[tf.Operation]]:
    """Return what gradients of additions passed on unchanged, and the ends of these gradients, first one first."""
    ends: list[tf.Operation] = []
    while True:
        # What leaves a replay has one around it that refuses second derivatives.
        passed = tensor.op.inputs[tensor.value_index] if tensor.op.type == "IdentityN" else tensor
        source = _before_addition(passed) if _is_of_sum(passed.op) else None
        if source is None:
            return tensor, ends[::-1]
        ends.append(passed.op)
        tensor = source


def _is_of_sum(operation: tf.Operation) -> bool:
    return operation.type == "Reshape" and operation.inputs[0].op.type == "Sum"


def _before_addition(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return what the gradient of an addition brought to the shape of an operand, None where that is another one."""
    summed = tensor.op.inputs[0].op.inputs[0]
    return summed if _is_shaped_alike(summed, tensor) else None


def _is_shaped_alike(one: tf.Tensor, two: tf.Tensor) -> bool:
    """Whether two tensors are known to have as many axes, and what is known of their sizes is the same."""
    return None not in (one.shape.rank, two.shape.rank) and one.shape.as_list() == two.shape.as_list()


def _before_reshapes(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return what reshapes have brought back to its own shape, or None: graph optimisation takes such ones out.

    The gradient of a bias passes them that Keras reshapes to the number of axes and squeezes, as for a convolution.
    """
    source = tensor
    while tensor.shape.is_fully_defined() and source.op.type == "Reshape":
        source = source.op.inputs[0]
        if _is_shaped_alike(source, tensor):
            return source
    return None


def under_plain_name(
    gate: tf.Tensor | None,
    held: bool,
    name: str,
    gradient: tf.Tensor,
    output: tf.Tensor,
    view: Callable[[tf.Tensor], tf.Tensor],
    *,
    one_of_several: bool,
) -> tf.Tensor:
    """Return the gradient that arrived for a replayed output, under its name in the plain step where that matters.

    It becomes a term of a sum or a factor of a product, which are sorted by name. And operations of gradients wait for
    it, as the sigmoid does that the gradient of silu computes: that keeps graph optimisation from taking them for the
    same ones of the forward pass. All that is replayed waits for the gradient as it arrived, by the gate, but not for
    its copy. A kernel gets the gradient as it is, unless that is ``held`` by the gate. What reads it reads a ``view``.

    What is ``one_of_several`` terms keeps its buffer: a sum starts with the first of its terms whose buffer nobody else
    has (``aggregate_ops.cc: AddNOp``). Two of them may share one, as where a branch adds what is added to its result,
    too. It waits for the gate: until then, what reads an element of it for the gate has its buffer, too.
    """
    # An output that the replay itself reads, too, gets a sum.
    if gate is None or not (held or output.consumers() or not _goes_to_a_kernel(output)):
        return view(gradient)
    own_name = name if gradient.op.type == "Placeholder" else None
    if one_of_several and not held and not has_layout(gradient):
        with tf.control_dependencies([gate]):
            return _copied(gradient, lambda each: kept(each, _ARRIVED), own_name, view)
    return _copied(gradient, lambda each: after(gate, each, _ARRIVED), own_name, view)


def released(gate: tf.Tensor | None, gradient: tf.Tensor) -> tf.Tensor:
    """Return a gradient that leaves a replay, after the gate if any, under its name in the plain step.

    Graph optimisation sorts the terms of a sum by name, and what passes straight through an addition is such a term.
    """
    return _copied(gradient, lambda each: after(gate, each, READY))


def _copied(
    gradient: tf.Tensor,
    copied: Callable[[tf.Tensor], tf.Tensor],
    name: str | None = None,
    view: Callable[[tf.Tensor], tf.Tensor] = lambda tensor: tensor,
) -> tf.Tensor:
    """Return a ``view`` of a gradient, as an operation with its name in the plain step, or with another one.

    ``copied`` makes the operation. Where graph optimisation cannot tell that an addition's operands are of one shape,
    it keeps what sums their gradients up to their shapes, and its names. So what is copied is the gradient before that,
    which has its own sizes, and these operations, which change nothing, follow it.
    """
    source, ends = (gradient, []) if name is not None else _before_additions(gradient)
    with tf.name_scope(f"{name or maker_of(source).name}/"):
        copy = copied(source)
    seen = view(copy)
    gradient = seen
    for reshape in ends:
        total = reshape.inputs[0].op
        with tf.name_scope(f"{reshape.name.rpartition('/')[0]}/"):
            gradient = tf.raw_ops.Sum(input=gradient, axis=total.inputs[1], name=total.name.rpartition("/")[2])
            shape = reshape.inputs[1] if seen is copy else tf.shape(seen)
            gradient = tf.reshape(gradient, shape, name=reshape.name.rpartition("/")[2])
    return gradient


def of_shape(copy: tf.Tensor, gradient: tf.Tensor, output: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Return a copy of the gradient of a replayed output so that graph optimisation sees that they have one shape.

    A size that is not known has a symbol. Where a replay makes symbols, they are others than those of the forward pass,
    from which the gradient has its own. Factors of a product of which it is not known that they have one shape are put
    into another order. A view of the gradient, in the shape of what the replay made, has the replay's symbol. There is
    none where the replay has its symbols from what it reads: a view is one more factor, which moves constants.

    What has symbols of its own in the plain step, too, keeps them (``has_sizes_of_its_own``), unless an ``Einsum``
    makes them those of its operands: it does so in the plain step, and a replay that ends with it does not run it. The
    gradient as it arrived says so: a copy may be of what was not yet summed up to the output's shape.
    """
    # Factors are sorted by name, too.
    with tf.name_scope(f"{copy.op.name}/"):
        factor = _factor_in_einsum(output)
        if factor is not None:
            return tf.broadcast_to(copy, _shape_by_labels(output, factor))
        source = _read_by_products(output)
        if source is None or has_sizes_of_its_own(gradient, first):
            return copy
        if symbol_of(output) != symbol_of(first):
            return tf.broadcast_to(copy, tf.shape(source))
    return copy


def has_sizes_of_its_own(gradient: tf.Tensor, first: tf.Tensor) -> bool:
    """Whether a gradient for an output of a first run has its sizes from what gives them new symbols.

    An output of known sizes, or that no product is made of, has no such gradient.
    """
    if _read_by_products(first) is None:
        return False
    at_once = _is_factor_at_once(first)
    start = place_of(first.op) if first.graph is gradient.graph else 0
    own: dict[int, bool] = {}
    pending = [gradient]
    while pending:
        tensor = pending[-1]
        is_later = place_of(tensor.op) >= start and not (tensor.dtype != tf.variant and tensor.shape.is_fully_defined())
        sources = _sources_of_sizes(tensor, at_once) if is_later else ()
        unknown = [each for each in sources if id(each) not in own]
        # Where graph optimisation is told that sizes are equal, one that is known is enough.
        decides = tensor.op.type not in MERGING_SHAPES
        if is_later and (makes_symbols(tensor.op) or _is_losses(tensor)):
            own[id(tensor)] = True
        elif any(own.get(id(each)) is decides for each in sources):
            own[id(tensor)] = decides
        elif not unknown:
            own[id(tensor)] = bool(sources) and not decides
        else:
            pending.append(unknown[0])
            continue
        pending.pop()
    return own[id(gradient)]


def _sources_of_sizes(tensor: tf.Tensor, at_once: bool) -> Sequence[tf.Tensor]:
    """Return what a tensor has its sizes from; for what is given a shape that is nothing, but for a ``Reshape``.

    That has them from what is to have the same shape, and, unless that counts ``at_once``, from its input, since it is
    taken out if it may hand that on as it is.
    """
    operation = tensor.op
    if operation.type == "IdentityN":
        return (operation.inputs[tensor.value_index],)
    if operation.type in CROSSENTROPIES | SHAPED_LIKE_FIRST:
        return (operation.inputs[0],)
    if operation.type == "Reshape":
        given, alike = operation.inputs[0], operation.inputs[1].op
        taken = tuple(alike.inputs) if alike.type == "Shape" else ()
        return taken if taken and (at_once or _is_summed_over_batches(given)) else (given, *taken)
    return () if any(map(is_of_shapes, operation.inputs)) else tuple(operation.inputs)


def _is_summed_over_batches(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a gradient of a ``BatchMatMul``, of which graph optimisation knows no size.

    Such a gradient is summed over the dimensions that were broadcast. Graph optimisation finds these out only where
    whole shapes are compared (``constant_folding.cc: MaterializeBroadcastGradientArgs``), here it is slices of shapes.
    """
    if tensor.op.type != "Sum":
        return False
    axes = tensor.op.inputs[1].op
    return axes.type == "BroadcastGradientArgs" and any(each.op.type == "StridedSlice" for each in axes.inputs)


def _is_losses(tensor: tf.Tensor) -> bool:
    return tensor.op.type in CROSSENTROPIES and tensor.value_index == 0


def _read_by_products(output: tf.Tensor) -> tf.Tensor | None:
    """Return an operand of the product that an output was made of, element by element, if that is one of products.

    The gradient of such a product has three factors and more, and reads that operand, its shape, too. So does what has
    such a gradient by itself, as a power, whose operand is returned, or a ``Softmax``, which is returned itself.
    """
    if output.shape.rank is None or output.shape.is_fully_defined():
        return None
    tensor = output
    while tensor.op.type in ELEMENT_BY_ELEMENT:
        whole = _operands_of_its_shape(tensor)
        if len(whole) == 1 and tensor.op.type in _GRADIENT_FACTORS:
            return whole[0]
        if len(whole) == 1:
            tensor = whole[0]
            continue
        # The gradients of an addition are brought to the shapes of its operands by TensorFlow.
        is_product = whole and tensor.op.type not in ADDITIONS
        return whole[0] if is_product and any(each.op.type in ELEMENT_BY_ELEMENT for each in whole) else None
    return tensor if tensor.op.type in _PRODUCT_GRADIENTS else None


def _is_factor_at_once(output: tf.Tensor) -> bool:
    """Whether a gradient is a factor in the first round of graph optimisation, before any ``Reshape`` is taken out.

    That of what has one operand is, as a power, also if constants scale it: gradients of other products end with one.
    """
    tensor, whole = output, [output]
    while len(whole) == 1:
        tensor = whole[0]
        if tensor.op.type in _GRADIENT_FACTORS:
            return True
        whole = _operands_of_its_shape(tensor) if tensor.op.type in ELEMENT_BY_ELEMENT else []
    return False


def _operands_of_its_shape(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return those operands of an operation on elements that have the shape of what it makes."""
    return [
        each
        for each in tensor.op.inputs
        if each.dtype == tensor.dtype and each.shape.rank and _is_shaped_alike(each, tensor)
    ]


def _factor_in_einsum(output: tf.Tensor) -> tf.Tensor | None:
    """Return the operand whose gradient is a product, as an attention's ``Softmax``, if an ``Einsum`` made the output.

    Where all sizes are known, and where the equation leaves labels out, that is None.
    """
    operation, is_open = output.op, output.shape.rank is not None and not output.shape.is_fully_defined()
    if operation.type != "Einsum" or not is_open or b"." in operation.get_attr("equation"):
        return None
    return next((each for each in operation.inputs if each.op.type in _PRODUCT_GRADIENTS), None)


def _shape_by_labels(output: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Return the shape of what an ``Einsum`` made, from its operands: as ``factor`` has it where labels are shared.

    Graph optimisation follows a symbol through slices of shapes and their concatenation.
    """
    terms, result = output.op.get_attr("equation").decode().split("->")
    operands = sorted(zip(output.op.inputs, terms.split(","), strict=True), key=lambda each: each[0] is not factor)
    sizes: list[tf.Tensor | list[int]] = []
    for label, size in zip(result, output.shape, strict=True):
        tensor, labels = next(each for each in operands if label in each[1])
        place = labels.index(label)
        sizes.append([size] if size is not None else tf.shape(tensor)[place : place + 1])
    return tf.concat(sizes, axis=0)


def may_be_summed(tensor: tf.Tensor, segment: Sequence[tf.Operation]) -> bool:
    """Whether the gradient of what a segment reads may become a term of a sum outside, as it is."""
    inside = {id(operation) for operation in segment}
    if any(id(reader) not in inside and reader.type != "IdentityN" for reader in tensor.consumers()):
        return True
    # The replay of another segment names what arrives itself.
    return not ends_segment(tensor.op) and not _goes_to_a_kernel(tensor)


def gradient_as_term(gradient: tf.Tensor, gates: Gates) -> tf.Tensor:
    """Return a gradient under its name in the plain step, by an operation that tells graph optimisation its shape.

    It keeps its buffer, which another gradient may share, as those of the two operands of an addition do: a sum starts
    with the first of its terms whose buffer nobody else has.
    """
    if has_layout(gradient):
        gate = gates.gate([gates.first_elements([gradient])])
        return _copied(gradient, lambda each: after(gate, each, _TERM))
    with stop_recording():
        term = _copied(gradient, lambda each: kept(each, _TERM))
    record_operation("Identity", [term], [gradient], lambda further: [further])
    return term


def as_term(tensor: tf.Tensor, one_of_several: bool, note: Callable[[Any], None]) -> tf.Tensor:
    """Return a tensor under its name in the plain step, since it may be a term of a sum, which is sorted by name.

    ``KEPT_IDENTITY`` stays in the graph, and its kernel copies nothing. Where a size is not known, an identity has to
    do that is taken out with the ``IdentityN`` in front of it. But that has one name for all that it passes on: where
    that is several terms (``one_of_several``), the first stays. On a GPU none may stay behind what has a layout.

    The gradient of what is returned is told to ``note`` by a tape, right after it was added up.
    """
    with tf.name_scope(f"{maker_of(tensor).name}/"), stop_recording():
        stays = (one_of_several or tensor.shape.is_fully_defined()) and not has_layout(tensor)
        passed = kept(tensor, _TERM) if stays else tf.identity(tensor, _TERM)

    def arrived(gradient: Any) -> list[Any]:
        note(gradient)
        return [gradient]

    record_operation("Identity", [passed], [tensor], arrived)
    return passed


def kept(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """Return a tensor, passed on by an operation that graph optimisation leaves in place."""
    # For tapes and SavedModels, the gradient is that of an identity.
    with tf.compat.v1.get_default_graph().gradient_override_map({KEPT_IDENTITY: "Identity"}):
        return getattr(tf.raw_ops, KEPT_IDENTITY)(input=tensor, name=name)


def has_layout(tensor: tf.Tensor) -> bool:
    """Whether graph optimisation may give a tensor another layout here, which an identity that stays would undo."""
    return tensor.shape.rank in RANKS_WITH_LAYOUTS and has_gpu()


def _goes_to_a_kernel(tensor: tf.Tensor) -> bool:
    """Whether the first that changes the gradient of a tensor is a kernel, which graph optimisation leaves as it is."""
    operation = _first_to_change(tensor)
    if operation.type == "IdentityN" and has_custom_gradient(operation):
        return ends_segment(operation)
    return operation.type in KERNEL_GRADIENTS


def _first_to_change(tensor: tf.Tensor) -> tf.Operation:
    """Return the operation that the gradient of a tensor comes to before it is changed."""
    operation = tensor.op
    while operation.type in PASSED_STRAIGHT:
        source = operation.inputs[0]
        if len(source.consumers()) > 1:
            break
        operation = source.op
    return operation


def gated_input(gate: tf.Tensor | None, tensor: tf.Tensor, forward_first: bool | None) -> tf.Tensor:
    """Return ``after`` of ``tensor``, with its name in the plain step."""
    if gate is None:
        return after(None, tensor)
    with tf.name_scope(plain_name(maker_of(tensor).name, tensor.graph, forward_first)):
        return after(gate, tensor, "gated")
