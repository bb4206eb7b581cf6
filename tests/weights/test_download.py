"""Who is given which run, decided with a clock in the test's hands."""

from __future__ import annotations

from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent
from swarmnode.weights.fetcher import MIN_OVERDUE_S, OVERDUE_S, RUN_CHUNKS, ChunkRange, Download

RUNS = 6
FILE = FileContent("model.safetensors", RUNS * RUN_CHUNKS * CHUNK_BYTES, bytes(32))


def download() -> Download:
    return Download({FILE: range(FILE.chunks())})


def bring(download: Download, source: str, run: ChunkRange, now_s: float) -> None:
    for number in run.numbers:
        assert download.came(FILE, number)
    download.give_back(source, run, now_s)


def take(download: Download, source: str, now_s: float) -> ChunkRange:
    run = download.assign(source, now_s)
    assert run is not None
    return run


def test_a_source_may_hold_several_runs_and_gives_back_each_alone() -> None:
    work = download()
    first, second = take(work, "a", 0.0), take(work, "a", 0.0)
    assert first != second
    bring(work, "a", first, 1.0)
    work.give_back("a", second, 1.0)  # it failed
    rest = [take(work, "b", 1.0) for _ in range(RUNS - 1)]
    assert second in rest and first not in rest
    assert work.assign("b", 1.0) is None


def test_what_hangs_is_given_to_another_after_some_times_what_runs_take() -> None:
    work = download()
    hanging = take(work, "hanging", 0.0)
    assert work.overdue_s == OVERDUE_S, "nobody knows yet"
    now_s = 0.0
    for _ in range(RUNS - 1):
        run = take(work, "good", now_s)
        now_s += 0.1
        bring(work, "good", run, now_s)
    assert work.overdue_s == MIN_OVERDUE_S
    assert work.assign("good", 0.9) is None and work.assign("hanging", 5.0) is None
    assert work.assign("good", 1.1) == hanging
    bring(work, "good", hanging, 1.2)
    assert work.done


def test_slow_sources_all_have_their_time() -> None:
    work = download()
    bring(work, "slow", take(work, "slow", 0.0), 30.0)
    assert work.overdue_s == OVERDUE_S
