"""Laws of peak memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asa.cost.memory import around
from asa.cost.memory.peak import Footprint, peak, usable
from asa.ir.cluster import Device
from asa.ir.units import GIB, MIB

footprints = st.lists(
    st.builds(
        Footprint,
        state=st.floats(0, 100),
        activations=st.floats(0, 100),
        gradients=st.floats(0, 100),
        transient=st.floats(0, 100),
    ),
    min_size=1,
    max_size=12,
)


def test_24_equal_linear_layers_peak_at_200_mib_and_not_at_288():
    layer = Footprint(state=4 * MIB, activations=4 * MIB, gradients=4 * MIB)
    layers = [layer] * 24
    total = sum(f.state + f.activations + f.gradients for f in layers)
    found = peak([Footprint(state=4 * MIB, activations=4 * MIB, gradients=4 * MIB, transient=4 * MIB)] * 24,
                 [Footprint()] * 24)  # fmt: skip
    assert total == 288 * MIB
    assert found.total == 200 * MIB


@given(footprints)
def test_the_peak_lies_between_state_and_the_plain_sum(parts):
    found = peak(parts, [Footprint()] * len(parts))
    state = sum(f.state for f in parts)
    assert state <= found.total <= state + sum(f.activations + f.gradients + f.transient for f in parts) + 1e-9
    assert found.total == pytest.approx(found.state + found.activations + found.gradients + found.transient)


@given(footprints)
def test_the_peak_is_the_highest_moment_of_a_step_played_back(parts):
    state = sum(f.state for f in parts)
    held, highest = state + sum(f.activations for f in parts), 0.0
    for f in reversed(parts):
        held += f.gradients
        highest = max(highest, held + f.transient)
        held -= f.activations
    assert peak(parts, [Footprint()] * len(parts)).total == pytest.approx(highest)


def test_a_boundary_counts_with_the_component_behind_it():
    parts = [Footprint(activations=1.0), Footprint(activations=1.0)]
    assert peak(parts, [Footprint(), Footprint(activations=5.0, transient=2.0)]).total == 9.0


def test_context_and_allocator_are_set_apart_on_cuda_only():
    cuda = Device(name="g", type="cuda", memory_bytes=16 * GIB)
    cpu = Device(name="c", type="cpu", memory_bytes=16 * GIB)
    assert usable(cpu, None, 4) == 16 * GIB
    assert usable(cpu, GIB, 1) == GIB
    assert usable(cuda, None, 2) < usable(cuda, None, 1) < 15.01 * GIB


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_what_lies_around_a_component(sizes):
    front, behind, rest = around._summed([float(s) for s in sizes])
    for i in range(len(sizes)):
        assert front[i] == next((s for s in reversed(sizes[:i]) if s > 0), 0)
        assert behind[i] == next((s for s in sizes[i + 1 :] if s > 0), 0)
        assert rest[i] == sum(sizes[i:])
