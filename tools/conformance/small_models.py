"""Small models of every shape that people train, built with the seed that is set."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


def _descend(optimizer: Any, tape: Any, loss: Any, variables: list[Any]) -> None:
    gradients = tape.gradient(loss, [v.value for v in variables])
    optimizer.apply_gradients(zip(gradients, variables, strict=True))


@keras.saving.register_keras_serializable("conformance")
class KlDivergence(layers.Layer):
    """Samples from a normal distribution and adds its divergence from the standard normal one to the losses."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs: Any) -> Any:
        """Return a sample for ``(mean, log variance)``."""
        mean, log_variance = inputs
        divergence = 1.0 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance)
        self.add_loss(-0.5 * keras.ops.mean(keras.ops.cast(divergence, keras.config.floatx())))
        noise = keras.random.normal(keras.ops.shape(mean), dtype=mean.dtype, seed=self.seed_generator)
        return mean + keras.ops.exp(0.5 * log_variance) * noise


@keras.saving.register_keras_serializable("conformance")
class OwnStep(keras.Model):
    """A Functional model with a training step of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        """Train on a doubled loss and count the steps."""
        import tensorflow as tf

        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = 2.0 * self.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=True)
        _descend(self.optimizer, tape, loss, self.trainable_variables)
        return {"loss": loss}


def _dense_blocks(x: Any, blocks: int, width: int = 64, **dense: Any) -> Any:
    for _ in range(blocks):
        x = layers.Dense(width, activation="gelu", **dense)(x)
        x = layers.Dropout(0.2)(layers.BatchNormalization()(x))
    return x


def perceptron() -> Any:
    """Return Dense layers with BatchNorm and Dropout."""
    inputs = keras.Input((32,))
    return keras.Model(inputs, layers.Dense(4)(_dense_blocks(inputs, 6)))


def own_step() -> Any:
    """Return the same with a training step of its own."""
    inputs = keras.Input((32,))
    return OwnStep(inputs, layers.Dense(4)(_dense_blocks(inputs, 6)))


def sequential() -> Any:
    """Return a Sequential classifier of images with augmentation."""
    return keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            layers.RandomFlip("horizontal"),
            layers.RandomTranslation(0.1, 0.1),
            *[
                layer
                for filters in (16, 32, 32)
                for layer in (
                    layers.Conv2D(filters, 3, padding="same", use_bias=False),
                    layers.BatchNormalization(),
                    layers.ReLU(),
                    layers.MaxPooling2D(),
                )
            ],
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )


def residual() -> Any:
    """Return a residual network with BatchNorm, Dropout and a weight penalty."""
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(16, 3, padding="same", kernel_regularizer="l2")(inputs)
    for _ in range(4):
        y = layers.Conv2D(16, 3, padding="same", use_bias=False, kernel_regularizer="l2")(x)
        y = layers.SpatialDropout2D(0.1)(layers.ReLU()(layers.BatchNormalization()(y)))
        x = layers.Add()([x, y])
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x)))


def unet() -> Any:
    """Return a U-Net."""
    x = inputs = keras.Input((16, 16, 3))
    skips = []
    for filters in (8, 16):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x)))
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    for skip, filters in zip(reversed(skips), (16, 8), strict=True):
        x = layers.Concatenate()([skip, layers.Conv2DTranspose(filters, 2, strides=2)(x)])
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x)))
    return keras.Model(inputs, layers.Conv2D(4, 1, activation="softmax")(x))


def _block(x: Any, width: int, heads: int = 4, causal: bool = False) -> Any:
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(y, y, use_causal_mask=causal)
    x = layers.Add()([x, layers.Dropout(0.1)(y)])
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(y))])


def text_classifier() -> Any:
    """Return a transformer over masked words."""
    inputs = keras.Input((24,), dtype="int32")
    x = layers.Embedding(30, 32, mask_zero=True)(inputs)
    for _ in range(3):
        x = _block(x, 32)
    return keras.Model(inputs, layers.Dense(4, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


def language_model() -> Any:
    """Return a causal transformer with as many outputs as words."""
    inputs = keras.Input((24,), dtype="int32")
    x = layers.Embedding(30, 32)(inputs)
    for _ in range(3):
        x = _block(x, 32, causal=True)
    return keras.Model(inputs, layers.Dense(30)(layers.LayerNormalization()(x)))


def albert() -> Any:
    """Return a transformer whose blocks share their weights."""
    attention, norms = layers.MultiHeadAttention(4, 8), [layers.LayerNormalization() for _ in range(2)]
    up, down = layers.Dense(128, activation="gelu"), layers.Dense(32)
    inputs = keras.Input((24, 32))
    x = layers.Dense(32)(inputs)
    for _ in range(4):
        x = norms[0](layers.Add()([x, attention(x, x)]))
        x = norms[1](layers.Add()([x, down(up(x))]))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def recurrent() -> Any:
    """Return masked words through a Bidirectional LSTM and a GRU."""
    inputs = keras.Input((12,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(inputs)
    x = layers.Dense(16, activation="tanh")(x)
    x = layers.Bidirectional(layers.LSTM(16, return_sequences=True, dropout=0.1))(x)
    x = layers.Dense(32, activation="tanh")(x)
    x = layers.GRU(16, recurrent_dropout=0.1)(x)
    return keras.Model(inputs, layers.Dense(4)(x))


def convolutional_lstm() -> Any:
    """Return a ConvLSTM over small films."""
    x = inputs = keras.Input((4, 8, 8, 2))
    x = layers.TimeDistributed(layers.Conv2D(8, 3, padding="same", activation="relu"))(x)
    x = layers.ConvLSTM2D(8, 3, padding="same", return_sequences=True)(x)
    x = layers.TimeDistributed(layers.BatchNormalization())(x)
    x = layers.ConvLSTM2D(8, 3, padding="same")(x)
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def encoder_decoder() -> Any:
    """Return a sequence-to-sequence LSTM that passes its states on."""
    source, target = keras.Input((10, 8), name="source"), keras.Input((6, 8), name="target")
    x = layers.Dense(16, activation="tanh")(source)
    x, *states = layers.LSTM(16, return_sequences=True, return_state=True)(x)
    y = layers.LSTM(16, return_sequences=True)(layers.Dense(16, activation="tanh")(target), initial_state=states)
    y = layers.Attention()([y, x])
    return keras.Model([source, target], layers.Dense(8)(layers.Dense(32, activation="relu")(y)))


def siamese() -> Any:
    """Return two towers with the same weights, and their distance."""
    x = inputs = keras.Input((32,))
    tower = keras.Model(inputs, layers.Dense(16)(_dense_blocks(x, 3)), name="tower")
    left, right = keras.Input((32,), name="left"), keras.Input((32,), name="right")
    distance = keras.ops.abs(tower(left) - tower(right))
    return keras.Model([left, right], layers.Dense(1)(distance))


def autoencoder() -> Any:
    """Return a variational autoencoder that adds its divergence as a loss."""
    inputs = keras.Input((32,))
    x = layers.Dense(64, activation="relu")(layers.Dense(64, activation="relu")(inputs))
    x = KlDivergence()([layers.Dense(8)(x), layers.Dense(8)(x)])
    for _ in range(3):
        # Keras adds losses of one dtype only, and a penalty has that of the layer.
        x = layers.Dense(64, activation="relu", activity_regularizer="l2", dtype=keras.config.floatx())(x)
    return keras.Model(inputs, layers.Dense(32)(x))


def dictionaries() -> Any:
    """Return a model with a dict of inputs and a dict of outputs."""
    image, number = keras.Input((8, 8, 3), name="image"), keras.Input((4,), name="number")
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(16, 3, activation="relu")(image))
    x = _dense_blocks(layers.Concatenate()([x, layers.Dense(16)(number)]), 4)
    outputs = {"kind": layers.Dense(3, activation="softmax")(x), "value": layers.Dense(1)(x)}
    return keras.Model({"image": image, "number": number}, outputs)


def nested() -> Any:
    """Return models inside models, three deep, one of them called twice."""
    inner = keras.Sequential([keras.Input((32,)), layers.Dense(32, activation="tanh"), layers.Dropout(0.1)])
    x = inputs = keras.Input((32,))
    middle = keras.Model(inputs, layers.BatchNormalization()(inner(layers.Dense(32)(x))))
    x = inputs = keras.Input((32,))
    outer = keras.Model(inputs, layers.Dense(32, activation="relu")(middle(x)))
    x = inputs = keras.Input((32,))
    return keras.Model(inputs, layers.Dense(4)(outer(layers.Add()([x, outer(x)]))))


def frozen_backbone() -> Any:
    """Return a frozen backbone, in inference mode, with a head that is trained."""
    backbone = keras.applications.MobileNetV2(weights=None, include_top=False, input_shape=(32, 32, 3), alpha=0.35)
    backbone.trainable = False
    inputs = keras.Input((32, 32, 3))
    x = layers.GlobalAveragePooling2D()(backbone(inputs, training=False))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(_dense_blocks(x, 4)))


def partly_frozen() -> Any:
    """Return a residual network whose first half is frozen."""
    model = residual()
    for layer in model.layers[: len(model.layers) // 2]:
        layer.trainable = False
    return model


def layer_policies() -> Any:
    """Return layers of several dtypes."""
    x = inputs = keras.Input((32,))
    for dtype in ("float32", "mixed_float16", "float64", "mixed_bfloat16"):
        x = layers.Dropout(0.1, dtype=dtype)(layers.Dense(64, activation="gelu", dtype=dtype)(x))
    return keras.Model(inputs, layers.Dense(4, dtype="float32")(x))


def spectral() -> Any:
    """Return spectral normalisation, group normalisation and noise."""
    x = inputs = keras.Input((16, 16, 3))
    for _ in range(3):
        x = layers.SpectralNormalization(layers.Conv2D(16, 3, padding="same"))(x)
        x = layers.GaussianNoise(0.1)(layers.ReLU()(layers.GroupNormalization(4)(x)))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def operators() -> Any:
    """Return operations on symbolic tensors, and sums of many terms."""
    x = inputs = keras.Input((32,))
    for _ in range(4):
        y = layers.Dense(32)(layers.LayerNormalization()(x))
        x = x + keras.ops.tanh(y) * 0.5 + keras.ops.square(y) / (1.0 + keras.ops.exp(-y)) + inputs
    return keras.Model(inputs, layers.Dense(4)(x))


@keras.saving.register_keras_serializable("conformance")
class Block(layers.Layer):
    """A transformer block that other code calls."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(4, width // 4, dropout=0.1)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.up, self.down = layers.Dense(4 * width, activation="gelu"), layers.Dense(width)
        self.drop = layers.Dropout(0.1)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return what comes behind the block."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, training=training)
        return x + self.drop(self.down(self.up(self.norms[1](x))), training=training)


@keras.saving.register_keras_serializable("conformance")
class Subclassed(keras.Model):
    """Blocks, BatchNorm and TensorFlow's own functions in a ``call``, with a loss and a state."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stem, self.head = layers.Dense(32), layers.Dense(4)
        self.blocks = [Block(32) for _ in range(3)]
        self.norm = layers.BatchNormalization()
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x: Any, training: bool = False) -> Any:
        """Return four numbers for a sequence."""
        import tensorflow as tf

        x = self.stem(x)
        for block in self.blocks:
            x = block(x, training=training)
        x = tf.reduce_mean(self.norm(x, training=training), axis=1)
        if training:
            self.steps.assign(self.steps + 1)
            self.add_loss(1e-3 * tf.reduce_mean(tf.square(tf.cast(x, keras.config.floatx()))))
        return self.head(x)


@keras.saving.register_keras_serializable("conformance")
class Gan(keras.Model):
    """A Wasserstein GAN with a gradient penalty: two models, two optimizers, and second derivatives."""

    def __init__(self, generator: Any, critic: Any, seeds: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generator, self.critic, self.seeds = generator, critic, seeds

    def compile(self, optimizer: Any, loss: Any, **kwargs: Any) -> None:
        """Take an optimizer for the generator; the critic gets one like it."""
        super().compile(optimizer, loss, **kwargs)
        self.critic_optimizer = type(self.optimizer).from_config(self.optimizer.get_config())
        self.critic_optimizer.build(self.critic.trainable_variables)
        self.optimizer.build(self.generator.trainable_variables)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return what the critic makes of ``x``."""
        return self.critic(x, training=training)

    def optimized(self, batch_size: int, **options: Any) -> Any:
        """Return the same with both models optimized."""
        import tf_memsaver

        parts = [tf_memsaver.optimize(part, batch_size=batch_size, **options) for part in (self.generator, self.critic)]
        return Gan(parts[0], parts[1], self.seeds)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Train the critic, then the generator."""
        import tensorflow as tf

        import tf_memsaver

        real = data[0]
        noise = keras.random.normal(tf.shape(real), seed=self.seeds)

        def score(images: Any) -> Any:
            return tf.reduce_mean(tf.cast(self.critic(images, training=True), real.dtype))

        with tf.GradientTape() as tape:
            made = tf.cast(self.generator(noise, training=True), real.dtype)
            loss = score(made) - score(real)
            # Second derivatives go through the plain critic, which has the same weights.
            critic = tf_memsaver.strip(self.critic)
            with tf.GradientTape() as inner:
                between = 0.5 * (real + made)
                inner.watch(between)
                scores = critic(between, training=True)
            slope = tf.norm(inner.gradient(scores, between) + 1e-6, axis=-1)
            critic_loss = loss + 10.0 * tf.reduce_mean(tf.square(slope - 1.0))
        _descend(self.critic_optimizer, tape, critic_loss, self.critic.trainable_variables)
        with tf.GradientTape() as tape:
            loss = -score(self.generator(noise, training=True))
        _descend(self.optimizer, tape, loss, self.generator.trainable_variables)
        return {"critic_loss": critic_loss, "loss": loss}


def subclassed() -> Any:
    """Return a model that computes in a ``call`` of its own."""
    return Subclassed()


def gan() -> Any:
    """Return a Wasserstein GAN."""
    noise, image = keras.Input((32,)), keras.Input((32,))
    x = image
    for _ in range(3):
        x = layers.Dense(64, activation="tanh")(x)
    generator = keras.Model(noise, layers.Dense(32)(_dense_blocks(noise, 4)))
    return Gan(generator, keras.Model(image, layers.Dense(1)(x)), keras.random.SeedGenerator(3))
