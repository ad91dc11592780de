"""Which frame of a callchain is whose."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.perf.samples import GUEST, HYPERVISOR, KERNEL, USER, frames

K1, K2, U1, U2 = 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_C010_0000, 0x5555_0000_1000, 0x7FFF_1234
# PERF_CONTEXT_… of include/uapi/linux/perf_event.h.
HV, IN_KERNEL, IN_USER, DEFERRED = (2**64 - number for number in (32, 128, 512, 640))
IN_GUEST, IN_GUEST_KERNEL, IN_GUEST_USER = (2**64 - number for number in (2048, 2176, 2560))


@pytest.mark.parametrize(
    "words, regions",
    [
        (
            [IN_KERNEL, K1, K2, IN_USER, U1, U2],
            [(K1, KERNEL), (K2, KERNEL), (U1, USER), (U2, USER)],
        ),
        ([IN_USER, U1], [(U1, USER)]),
        ([IN_GUEST_KERNEL, K1, IN_GUEST_USER, U1], [(K1, GUEST), (U1, GUEST)]),
        ([IN_GUEST, K1], [(K1, GUEST)]),
        ([HV, K1, IN_KERNEL, K2], [(K1, HYPERVISOR), (K2, KERNEL)]),
        # As other readers have it: no markers.
        ([K1, K2, U1, U2], [(K1, KERNEL), (K2, KERNEL), (U1, USER), (U2, USER)]),
        ([K1], [(K1, KERNEL)]),
        ([U1], [(U1, USER)]),
        ([], []),
        ([IN_KERNEL, IN_USER], []),
        # What a user's stack holds is nobody's but the user's.
        ([IN_KERNEL, K1, IN_USER, U1, K2, U2], [(K1, KERNEL), (U1, USER), (K2, USER), (U2, USER)]),
        ([K1, U1, K2, U2], [(K1, KERNEL), (U1, USER), (K2, USER), (U2, USER)]),
        ([IN_USER, K2], [(K2, USER)]),
        ([IN_USER, U1, IN_KERNEL, K2], [(U1, USER), (K2, USER)]),
        ([IN_USER, U1, 2**64 - 1, U2], [(U1, USER), (U2, USER)]),
        ([IN_USER, U1, DEFERRED, U2], [(U1, USER), (U2, USER)]),
        # The kernel's own part ends, too, where an address is none of the kernel's.
        ([IN_KERNEL, K1, 0x1234, K2], [(K1, KERNEL), (0x1234, USER), (K2, USER)]),
        ([IN_KERNEL, K1, 2**64 - 7, K2], [(K1, KERNEL), (K2, KERNEL)]),
        # The user's part comes in another record, whose number follows.
        ([IN_KERNEL, K1, DEFERRED, 17], [(K1, KERNEL)]),
    ],
)
def test_regions(words: list[int], regions: list[tuple[int, str]]) -> None:
    assert list(frames(array("Q", words).tobytes())) == regions


@given(
    st.lists(st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([K1, U1, IN_KERNEL, IN_USER])))
)
def test_the_kernel_s_frames_come_first_and_have_kernel_addresses(words: list[int]) -> None:
    found = [(address, region) for address, region in frames(array("Q", words).tobytes())]
    assert [address for address, _ in found if address >= 2**64 - 4095] == []
    regions = [region for _, region in found]
    if USER in regions:
        assert set(regions[regions.index(USER) :]) == {USER}
    assert all(address >= 1 << 63 for address, region in found if region == KERNEL)
