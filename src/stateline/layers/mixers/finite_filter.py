"""Filters of a fixed number of taps, whose state is the latest inputs."""

from abc import abstractmethod
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from stateline.layers.base import SequenceLayer, records, zeros
from stateline.layers.decoder import prepared
from stateline.layers.documents import Documents, mask_of
from stateline.ops import short_conv, short_conv_step, short_conv_stepper, slide
from stateline.ops.dispatch import kernels_run
from stateline.ops.fft_conv import convolution_flops
from stateline.ops.short_conv import MOST_TAPS, OP
from stateline.ops.stepping import Stepper


class FiniteFilterState(NamedTuple):
    """The latest inputs, oldest first: one fewer than the filters have taps."""

    past: Float[Tensor, "batch past d_model"]

    @staticmethod
    def storable() -> tuple[str, ...]:
        """Past inputs are rounded only once."""
        return ("past",)


class FiniteFilter(SequenceLayer[FiniteFilterState]):
    """Causal filters of ``filter_len`` taps, one or more for each channel.

    Abstract: subclasses define the taps. Beyond ``filter_len`` taps the filters are zero, for any
    length of the input. The output holds the first filter's signals of all channels, then the
    second filter's, and so on.

    Attributes:
        filter_len: Taps of each filter, including the one for the current token.
    """

    filter_len: int

    @abstractmethod
    def taps(self) -> Float[Tensor, "output filter_len"]:
        """All filters, in float32 or better; a skip connection is part of the first tap."""

    def first_taps(self, count: int) -> Float[Tensor, "output taps"]:  # noqa: ARG002
        """At least ``count`` taps of each filter, if it has so many: all that a sequence needs."""
        return self.taps()

    def finish(self, y: Float[Tensor, "*batch output"]) -> Float[Tensor, "*batch output"]:
        """Apply the position-wise part after the filters; by default there is none."""
        return y

    def init_state(self, batch_size: int, *, capacity: int = 0) -> FiniteFilterState:  # noqa: ARG002
        """Zeros in place of past inputs."""
        parameter = next(self.parameters())
        return FiniteFilterState(zeros(parameter, batch_size, self.filter_len - 1, self.d_model))

    def resets(self, x: Tensor, state: FiniteFilterState | None = None) -> bool:  # noqa: ARG002
        """Whether the kernels take documents: long filters convolve by FFT."""
        return self.filter_len <= MOST_TAPS.get(x.device.type, 0) and kernels_run(OP, x.device.type)

    @override
    def forward(self, x: Tensor, starts: Documents | None = None) -> Tensor:
        taps = self.first_taps(x.shape[1])
        return self.finish(short_conv(x, taps, starts=mask_of(starts))).to(x.dtype)

    @override
    def forward_chunk(
        self, x: Tensor, state: FiniteFilterState, starts: Documents | None = None
    ) -> tuple[Tensor, FiniteFilterState]:
        mask = mask_of(starts)
        y = self.finish(short_conv(x, self.taps(), state.past, starts=mask))
        return y.to(x.dtype), FiniteFilterState(slide(state.past, x, mask))

    @override
    def step(self, x: Tensor, state: FiniteFilterState) -> tuple[Tensor, FiniteFilterState]:
        y, past = short_conv_step(x, self.weights(), state.past)
        return self.finish(y).to(x.dtype), FiniteFilterState(past)

    @override
    def step_(self, x: Tensor, state: FiniteFilterState) -> Tensor:
        recorded = not self.decodes and records(x)
        if recorded or self.d_output != self.d_model:
            return super().step_(x, state)
        return self.finish(self.stepper()(x, state.past)).to(x.dtype)

    @prepared
    def stepper(self) -> Stepper:
        """Steps in place, with the present weights."""
        return short_conv_stepper(self.weights()[0])

    def flops_per_token(self, length: int) -> float:
        """A convolution per output, or a multiply-add per tap where that costs less."""
        return self.d_output * min(convolution_flops(length), 2.0 * self.filter_len)

    @prepared
    def weights(self) -> Float[Tensor, "filter taps d_model"]:
        """The filters in the layout of the state: the tap of the oldest input comes first.

        Contiguous: on a view, a step takes several times as long.
        """
        return self.taps().unflatten(0, (-1, self.d_model)).flip(-1).mT.contiguous()
