import os

from tp.process import forget_peak, peak_resident_bytes, resident_bytes

BLOCK = 100_000_000
SLACK = 5_000_000  # the kernel counts pages of each thread in batches


def test_a_peak_is_remembered_until_it_is_forgotten() -> None:
    forget_peak()
    before = resident_bytes()
    block = bytearray(b"x") * BLOCK
    del block
    assert resident_bytes() < before + BLOCK / 2
    assert abs(peak_resident_bytes() - before - BLOCK) < SLACK
    forget_peak()
    assert peak_resident_bytes() < before + BLOCK / 2


def test_another_process_is_named_by_its_pid() -> None:
    assert abs(resident_bytes(os.getpid()) - resident_bytes()) < SLACK
