"""Requests that a source preempts: what is not copied is dropped, and comes later out of other pages."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from tests.session.handoff_world import (
    AUX,
    NHD,
    PATIENCE_S,
    PATIENT,
    TIMINGS,
    Clock,
    Job,
    Side,
    Transfer,
    World,
    cuts,
    until,
    without_leaks,
    worlds,
)
from tests.session.test_handoff_failures import FAULTS, Sabotage, copied, copying, granted, offered

from baton.errors import LocalProtocolError
from baton.plan import Chunk
from baton.protocol.outcomes import Failed, Ready, Stage, Waiting, Why
from baton.session import Aux, Finished, Handle, Withdrawal
from baton.transport import HostFence, Ticket, Transport

WHOLE = Chunk((0, 4), (0, 21))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


def withdraw(found: Transfer) -> dict[int, Withdrawal]:
    """Every rank withdraws, and no copy reads its pages any more."""
    withdrawals = {rank: sending.withdraw() for rank, sending in found.sendings.items()}
    for rank, withdrawal in withdrawals.items():
        assert withdrawal.wait(PATIENCE_S), f"copies of rank {rank} do not end"
        assert not found.sendings[rank].reading()
    return withdrawals


def resume(found: Transfer) -> None:
    """The pages are another request's now; the prompt is computed again in others."""
    found.move_source_pages()
    for sending in found.sendings.values():
        sending.resume()


def num_cells(withdrawal: Withdrawal) -> int:
    return sum(
        (chunk.layers[1] - chunk.layers[0]) * (chunk.tokens[1] - chunk.tokens[0])
        for chunk in withdrawal.landed
    )


def offer_some(found: Transfer, fences: list[HostFence]) -> None:
    """About half of the chunks are computed; the device has yet to compute the others."""
    rng = found.world.rng
    for layers in cuts(rng, 4):
        for tokens in cuts(rng, found.job.num_tokens):
            fence = HostFence()
            fences.append(fence)
            found.offer(layers, tokens, fence=fence)
            if rng.random() < 0.5:
                fence.set()


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
@pytest.mark.parametrize(
    ("source", "target", "is_packing"),
    [
        (Side("tp2"), Side("pp2", page_tokens=3), False),
        (Side("pp2.tp2"), Side("tp4"), False),
        (Side("tp2", dtype="fp16"), Side("tp1", dtype="fp32"), False),
        (Side("tp1", order=NHD), Side("tp2", order=NHD), True),
        (Side("tp1", granule=4), Side("tp1", granule=4), False),
    ],
    ids=["direct", "more-ranks", "convert", "pack", "granule"],
)
def test_a_preempted_prompt_arrives_out_of_other_pages(
    source: Side, target: Side, is_packing: bool, transport: str
) -> None:
    with worlds(source, target, transport=transport) as world:
        world.packs(is_packing)
        for is_verified in (False, True):
            found = world.transfer(Job(is_verified=is_verified))
            fences: list[HostFence] = []
            found.receive()
            found.send()
            offer_some(found, fences)
            before = withdraw(found)
            resume(found)
            offer_some(found, fences)
            after = withdraw(found)
            # What has landed stays landed.
            assert all(num_cells(after[rank]) >= num_cells(before[rank]) for rank in before)
            resume(found)
            found.offer_all()
            found.commit()
            found.check_ready()
            for fence in fences:
                fence.set()


def test_a_prompt_is_withdrawn_before_it_is_granted() -> None:
    with worlds(Side(num_pages=24), Side(num_pages=24)) as world:
        found = world.transfer(Job(32))
        found.send()
        found.offer((0, 4), (0, 32))
        assert withdraw(found)[0].landed == ()
        # A withdrawn prompt holds none of the pages that requests without a grant may hold together.
        other = world.transfer(Job(24))
        other.send()
        other.offer((0, 4), (0, 24))
        other.receive()
        other.commit()
        other.check_ready()
        resume(found)
        found.offer((0, 4), (0, 32))
        found.commit()
        found.receive()
        found.check_ready()


@pytest.mark.parametrize("reach", [offered, granted], ids=["ungranted", "granted"])
def test_a_prompt_of_which_nothing_landed(reach: Callable[[Transfer], None]) -> None:
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.transfer()
        reach(found)
        assert all(withdrawal.landed == () for withdrawal in withdraw(found).values())
        resume(found)
        if not found.receivings:
            found.receive()
        found.offer_all()
        found.commit()
        found.check_ready()


def test_a_prompt_of_which_everything_landed() -> None:
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.transfer()
        copied(found)
        num_copies = [len(sending.copies) for sending in found.sendings.values()]
        assert all(withdrawal.landed == (WHOLE,) for withdrawal in withdraw(found).values())
        resume(found)
        found.offer_all()
        found.commit()
        found.check_ready()
        assert [len(sending.copies) for sending in found.sendings.values()] == num_copies


def test_what_landed_is_not_copied_again() -> None:
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.transfer()
        copying(found)
        assert all(withdrawal.landed == (Chunk((0, 2), (0, 21)),) for withdrawal in withdraw(found).values())
        num_bytes = {rank: done_bytes(found, rank) for rank in found.sendings}
        resume(found)
        found.offer((0, 4), (0, 21))
        found.commit()
        found.check_ready()
        # The second half of the layers is as large as the first.
        assert {rank: done_bytes(found, rank) for rank in found.sendings} == {
            rank: 2 * count for rank, count in num_bytes.items()
        }


def done_bytes(found: Transfer, rank: int) -> int:
    return sum(copy.num_bytes for copy in found.sendings[rank].copies if copy.is_done)


def test_ranks_that_withdraw_after_their_commit() -> None:
    """One has sent everything and one has not: nothing is ready before that one commits again."""
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.transfer()
        granted(found)
        fence = HostFence()
        for rank, sending in found.sendings.items():
            sending.ready((0, 4), (0, 8), found.source_tables[rank])
            sending.ready((0, 4), (8, 21), found.source_tables[rank], HostFence() if rank else fence)
        found.commit()
        fence.set()
        rank_0, rank_1 = found.sendings.values()
        record_0, record_1 = (
            lambda transfers=endpoint._rank.source.transfers: transfers[found.id].record
            for endpoint in world.source.endpoints
        )
        until(lambda: record_0().state.value == "committed", "rank 0 to commit")
        until(lambda: record_1().landed, "the first chunk of rank 1 to land")
        withdrawals = withdraw(found)
        assert withdrawals[0].landed == (WHOLE,)
        assert withdrawals[1].landed == (Chunk((0, 4), (0, 8)),)
        until(lambda: found.receiving.early is not None, "the aux record")
        resume(found)
        for rank, sending in found.sendings.items():
            sending.ready((0, 4), (0, 21), found.source_tables[rank])
        rank_0.commit()
        assert isinstance(found.receiving.state, Waiting)
        # The first record stands: it may have been shown.
        rank_1.commit(Aux(tokens=(99,)))
        found.check_ready()
        assert found.receiving.early == AUX


def test_a_withdrawn_transfer_takes_nothing_until_it_is_resumed() -> None:
    with worlds(Side(), Side()) as world:
        found = world.transfer()
        copying(found)
        (sending,) = found.sendings.values()
        with pytest.raises(LocalProtocolError, match="resume without withdraw"):
            sending.resume()
        withdrawal = sending.withdraw()
        assert sending.withdraw() is withdrawal
        assert withdrawal.wait(PATIENCE_S)
        before = found.source_tables[0]
        found.move_source_pages()
        for call in (lambda: sending.ready((2, 4), (0, 21), before), lambda: sending.commit(AUX)):
            with pytest.raises(LocalProtocolError, match=r"after withdraw.*call resume first"):
                call()
        sending.resume()
        with pytest.raises(LocalProtocolError, match="resume without withdraw"):
            sending.resume()
        found.offer((0, 4), (0, 21))
        found.commit()
        found.check_ready()
        # Too late: there is nothing left to withdraw.
        assert sending.withdraw().is_quiet


class Stubborn:
    """A transport that gives no batch up, as one that has begun to move may not be."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def cancel(self, ticket: Ticket) -> None:
        pass


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_a_withdrawal_waits_for_the_copies_that_move(fault: str) -> None:
    """They land, they end for certain and are sent again, or they end in doubt and the transfer fails."""
    sabotage = Sabotage(1, **FAULTS.get(fault, {}))

    def wrap(rank: int, transport: Transport) -> Any:
        return Stubborn(sabotage(rank, transport))

    timings = {"timings": replace(TIMINGS, copy_s=3.0)}
    with worlds(Side("tp2", wrap=wrap, options=timings), Side("pp2")) as world:
        found = world.transfer()
        granted(found)
        fence = HostFence()
        found.offer((0, 4), (0, 21), fence=fence)
        sources = [world.source.endpoints[rank] for rank in found.sendings]
        until(lambda: all(source.counts()["copies"] for source in sources), "copies under way")
        withdrawals = {rank: sending.withdraw() for rank, sending in found.sendings.items()}
        records = [source._rank.source.transfers[found.id] for source in sources]
        until(lambda: all(one.record.state.value == "withdrawing" for one in records), "withdrawals")
        for rank, sending in found.sendings.items():
            assert sending.reading()
            assert not withdrawals[rank].is_quiet
            with pytest.raises(LocalProtocolError, match="wait until the withdrawal is quiet"):
                sending.resume()
        fence.set()
        withdraw(found)
        sabotage.mend()
        if fault in ("partial", "hang", "late"):
            cause = found.cause()
            assert (cause.why, cause.stage, cause.rank) == (Why.COPY_FAILED, Stage.COPY, 1)
            assert withdrawals[1].landed == ()
        else:
            assert withdrawals[0].landed == (WHOLE,)
            assert withdrawals[1].landed == (() if fault == "error" else (WHOLE,))
            resume(found)
            found.offer_all()
            found.commit()
            found.check_ready()
        world.hand_off()


def abort_target(found: Transfer) -> None:
    found.receiving.abort("gone")


def abort_source(found: Transfer) -> None:
    found.sendings[1].abort("gone")


@pytest.mark.parametrize("end", [abort_target, abort_source])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_a_transfer_that_is_aborted_around_a_withdrawal(
    end: Callable[[Transfer], None], is_before: bool
) -> None:
    with worlds(Side("tp2"), Side("pp2")) as world:
        found = world.transfer()
        copying(found)
        if is_before:
            end(found)
        withdraw(found)
        if not is_before:
            end(found)
        assert found.cause().why is Why.ABORTED
        # An engine that has not heard of it goes on, and nothing is copied.
        resume(found)
        num_copies = [len(sending.copies) for sending in found.sendings.values()]
        found.offer_all()
        found.commit()
        world.check_idle()
        assert [len(sending.copies) for sending in found.sendings.values()] == num_copies
        world.hand_off()


def test_a_target_that_is_lost_during_a_withdrawal() -> None:
    world = World(Side("tp2"), Side("tp1"))
    with closing(world):
        found = world.transfer()
        copying(found)
        withdrawals = {rank: sending.withdraw() for rank, sending in found.sendings.items()}
        world.target.close()
        for rank, sending in found.sendings.items():
            assert withdrawals[rank].wait(PATIENCE_S)
            assert isinstance(sending.wait(PATIENCE_S), Failed)
            assert sending.wait_released(PATIENCE_S)


def test_an_answer_that_ends_after_a_withdrawal() -> None:
    with worlds(Side(), Side()) as world:
        found = world.transfer()
        copying(found)
        (sending,) = found.sendings.values()
        withdrawal = sending.withdraw()
        sending.finish(AUX)
        assert found.outcome() == Finished(AUX)
        assert withdrawal.wait(PATIENCE_S)
        sending.resume()
        with pytest.raises(LocalProtocolError, match="after commit or finish"):
            found.offer((0, 4), (0, 21))


def test_the_deadlines_run_on_while_a_transfer_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timings = {"timings": replace(PATIENT, progress_s=PATIENCE_S)}
    with worlds(Side(options={"timings": PATIENT}), Side(options=timings)) as world:
        found = world.transfer()
        copying(found)
        withdraw(found)
        clock.end_by_deadline(found.receiving, PATIENCE_S)
        cause = found.cause()
        assert (cause.why, cause.stage, cause.instance) == (Why.DEADLINE, Stage.COPY, "d0")


def test_an_engine_is_called_back_when_its_pages_are_free() -> None:
    with worlds(Side(), Side()) as world:
        found = world.transfer()
        copying(found)
        changed: queue.Queue[Handle] = queue.Queue()
        world.source.first.on_change(changed.put)
        (sending,) = found.sendings.values()
        withdrawal = sending.withdraw()
        while not withdrawal.is_quiet:
            assert changed.get(timeout=PATIENCE_S) is sending
        resume(found)
        found.offer_all()
        found.commit()
        assert found.outcome() == Ready(AUX)


@pytest.mark.parametrize("delay_s", [0.0, 0.0005, 0.002])
def test_every_chunk_is_offered_before_a_withdrawal_or_refused(delay_s: float) -> None:
    """Another thread still offers: nothing of it is read after the withdrawal was quiet."""
    with worlds(Side(), Side()) as world:
        found = world.transfer()
        granted(found)
        (sending,) = found.sendings.values()
        submitted: list[Any] = []
        transport = world.source.first.transport
        submit = transport.submit

        def noted(*args: Any, **options: Any) -> Any:
            submitted.append(args)
            return submit(*args, **options)

        transport.submit = noted  # type: ignore[method-assign]
        refused: list[LocalProtocolError] = []

        def offer_layers() -> None:
            for layer in range(4):
                for token in range(21):
                    try:
                        found.offer((layer, layer + 1), (token, token + 1))
                    except LocalProtocolError as error:
                        refused.append(error)

        offering = threading.Thread(target=offer_layers)
        offering.start()
        time.sleep(delay_s)
        withdrawal = sending.withdraw()
        assert withdrawal.wait(PATIENCE_S)
        num_submitted = len(submitted)
        offering.join()
        assert all("after withdraw" in str(error) for error in refused)
        assert num_cells(withdrawal) <= 84 - len(refused)
        resume(found)
        assert len(submitted) == num_submitted
        found.offer_all()
        found.commit()
        found.check_ready()
