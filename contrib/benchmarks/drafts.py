"""Drafted tokens against plain decoding over three hops: `python contrib/benchmarks/drafts.py [--rows edits tools …] [--pairs 9]`.

Three nodes with one thread each are joined by delaying relays on loopback (`--delay-ms`, one way, for the rows that do not say
another delay), with `--no-direct`, in float32. Each pair decodes one prompt plainly and with drafts, in alternating order. Prints
JSON, for each row:

    speed_up    tokens/s with drafts over those without, median of the pairs, and its quartiles.
    tokens_per_turn    the same in counted passes, because three hops share the cores of one machine.
    oracle      the same for a proposer that knows the text; of_oracle is the share of its speed-up that the row reaches.
    different   texts that differ from plain decoding, each with its first different place and its length.

`edits` are copies with edits by the model of copying.py. Copies that repeat 30 bytes of themselves are left out. The other rows use
SmolLM2 (tests/trained.py): `tools` are calls whose schema forces most tokens, `json` has free values, `free` are questions without
look-up hits, `off` compares two plain runs and shows the noise. `model` are greedy answers to requests for code and to questions,
with `--drafts auto` and the draft model of distilled.py at the first hop. `by_proposer` has its guesses.

Two kinds of rows are about texts. `killed` has two holders of each hop. Each text loses one of its hops to SIGKILL: the first, the
middle and the last one in turn, once without and once with guesses. `longest_wait_s` are the longest waits for a token.
`same_edits`, `same_tools`, `same_json` and `same_free` compare `--tokens` tokens of eight sessions at once, without a delay: each
prompt as it is, then sampled with several seeds. Each different text is listed with the `gap` between the log probabilities of the
two tokens: up to 1e-5 the two are tied. It is null for a sampled text.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import uvloop
from copying import held_out, repeats, trained_model
from delaying_relay import DelayingRelay, free_port
from distilled import Recipe, distilled
from plain_decoding import PlainClient
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parents[2]))  # trained models belong to the tests

from swarmnode.codec.sampling import Grammar, GrammarKind
from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.measuring.meters import ACCEPTED, WASTED, by_proposer
from swarmnode.serving.client.generation import Generation
from swarmnode.serving.drafting.lookup import LookupDrafter
from swarmnode.swarm.storage.swarmfile import load_swarm
from tests.trained import SMOLLM2, trained

HOPS = 3
KILLED_AFTER = 24  # tokens
AT_ONCE, PROMPTS = 8, 64  # sessions and prompts of the rows that compare texts
LIKELIEST = 5  # tokens whose probabilities are asked for at a difference
TEXTS = "SWARMNODE_BENCH_TEXTS"  # environment variable with the file of the oracle's texts
Prompt = str | list[int]

CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_weather_forecast"},
        "arguments": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "maxLength": 24},
                "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                "include_precipitation": {"type": "boolean"},
                "number_of_days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["location", "temperature_unit", "include_precipitation", "number_of_days"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "occupation": {"type": "string", "maxLength": 40},
        "known_for": {"type": "string", "maxLength": 120},
    },
    "required": ["name", "occupation", "known_for"],
    "additionalProperties": False,
}
CITIES = ("Paris", "Lisbon", "Nairobi", "Osaka", "Lima", "Oslo", "Cairo", "Austin", "Perth")
PEOPLE = ("Ada Lovelace", "Marie Curie", "Alan Turing", "Grace Hopper", "Isaac Newton", "Emmy Noether", "Leonhard Euler",
          "Charles Darwin", "Rosalind Franklin")  # fmt: skip
QUESTIONS = (
    "Why is the sky blue?", "How does a refrigerator work?", "What is a leap year for?", "Why do cats purr?",
    "How is bread made?", "What causes tides?", "Why do leaves fall in autumn?", "How do bees find flowers?", "What is inflation?",
)  # fmt: skip


TASKS = (
    "Write a Python function that counts the vowels in a string.", "What is the difference between weather and climate?",
    "Write a Python class for a bank account.", "How do vaccines work?",
    "Write a Python function that merges two sorted lists.", "Why is the sea salty?",
    "Write a Python function that checks if a word is a palindrome.", "What does a compiler do?",
    "Write a Python function that returns the n-th Fibonacci number.",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A prompt and the options of its generation."""

    prompt: Prompt
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """Results of a row, pair by pair."""

    speed_ups: list[float] = field(default_factory=list)
    plain_tokens_per_s: list[float] = field(default_factory=list)
    tokens: int = 0
    turns: int = 0
    drafts: Counter[tuple[str, str]] = field(default_factory=Counter)
    different: list[dict[str, Any]] = field(default_factory=list)

    def note(self, plain: Sequence[Generation], drafted: Sequence[Generation], seconds: tuple[float, float]) -> None:
        """Add a pair: the texts of both runs, and the seconds that they took."""
        sums = [sum(len(one.ids) for one in run) for run in (plain, drafted)]
        self.plain_tokens_per_s.append(sums[0] / seconds[0])
        self.speed_ups.append(sums[1] / seconds[1] / self.plain_tokens_per_s[-1])
        for one, other in zip(plain, drafted, strict=True):
            self.tokens += len(other.ids)
            self.drafts.update(other.drafts)
            self.turns += len(other.ids) - other.accepted_drafts
            if (place := first_difference(one.ids, other.ids)) is not None:
                self.different.append({"at": place, "tokens": len(other.ids)})

    def report(self) -> dict[str, Any]:
        """Return the row as JSON holds it."""
        low, middle, high = quartiles(self.speed_ups)
        accepted, wasted = (
            sum(n for (_, name), n in self.drafts.items() if name == result) for result in (ACCEPTED, WASTED)
        )
        return {
            "speed_up": middle,
            "quartiles": [low, high],
            "plain_tokens_per_s": round(statistics.median(self.plain_tokens_per_s), 2),
            "tokens_per_turn": round(self.tokens / max(1, self.turns), 2),
            "accepted_share": round(accepted / max(1, accepted + wasted), 3),
            "accepted_per_turn": round(accepted / max(1, self.turns), 3),
            "wasted_per_token": round(wasted / max(1, self.tokens), 3),
            "by_proposer": by_proposer(self.drafts),
            "tokens": self.tokens,
            "different": self.different,
        }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of some values; all are the value itself if there is only one."""
    found = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    low, middle, high = (round(one, 3) for one in found)
    return low, middle, high


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place at which two texts differ; None if they are equal."""
    if list(one) == list(other):
        return None
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def edits(count: int) -> list[Work]:
    """Return prompts of the copying model: modules that it has not learnt."""
    found = [(prompt, copy) for prompt, copy in held_out(4 * count, 150) if not repeats(copy)]
    return [Work(list(prompt.encode()), {"max_new_tokens": 200}) for prompt, _ in found[:count]]


def schema(definition: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(definition))


def chat(question: str) -> str:
    """Return a question in SmolLM2's chat format."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def tools(count: int) -> list[Work]:
    """Return requests for a tool call."""
    asked = [f"Call get_weather_forecast for {city} as JSON." for city in CITIES]
    return [Work(chat(one), {"max_new_tokens": 90, "grammar": schema(CALL)}) for one in asked[:count]]


def free_values(count: int) -> list[Work]:
    """Return requests for JSON with free values."""
    asked = [f"Describe {name} as JSON." for name in PEOPLE]
    return [Work(chat(one), {"max_new_tokens": 110, "grammar": schema(PERSON)}) for one in asked[:count]]


def questions(count: int) -> list[Work]:
    """Return questions whose answers quote little."""
    return [Work(chat(one), {"max_new_tokens": 64, "temperature": 0.8, "seed": 7}) for one in QUESTIONS[:count]]


def tasks(count: int) -> list[Work]:
    """Return requests for code and questions."""
    return [Work(chat(one), {"max_new_tokens": 64}) for one in TASKS[:count]]


def rounds(works: Sequence[Work]) -> Iterator[Work]:
    """Yield the works, then the same ones sampled with seeds 1, 2, ..., without end."""
    yield from works
    for seed in itertools.count(1):
        for work in works:
            yield replace(work, options={**work.options, "temperature": 0.8, "seed": seed})


class Ring:
    """Nodes of a ring of three hops and a client, in processes of their own but for the client."""

    def __init__(self, swarm: LocalSwarm, relay: DelayingRelay, texts: Path, holders: int, draft: Path | None) -> None:
        self._draft = draft  # draft model of the first node
        self.texts = texts  # file that the oracle reads
        self._swarm = swarm
        self._relay = relay
        self._nodes: dict[str, int] = {}  # number of a node, by peer id
        self._holders = holders  # of each hop
        units = load_swarm(swarm.file).manifest.model.units  # type: ignore[union-attr]
        self._cuts = [round(number * units / HOPS) for number in range(HOPS + 1)]
        self.client: PlainClient

    @classmethod
    @contextlib.asynccontextmanager
    async def over(
        cls, model: Path, delay_s: float, holders: int = 1, draft: Path | None = None
    ) -> AsyncIterator[Ring]:
        """Start a ring with `holders` nodes for each hop, over relays of `delay_s` seconds each way. The first node gets the model
        `draft`, if there is one, else the oracle of oracle_node.py."""
        with tempfile.TemporaryDirectory(prefix="swarmnode-drafts-") as name, contextlib.ExitStack() as stack:
            relay = stack.enter_context(DelayingRelay(delay_s))
            swarm = stack.enter_context(LocalSwarm(Path(name)))
            texts = Path(name) / "texts.json"
            swarm.environment[TEXTS] = str(texts)
            await asyncio.to_thread(swarm.create, model)
            await asyncio.to_thread(swarm.bootstrap)
            ring = cls(swarm, relay, texts, holders, draft)
            nodes = [ring._start(number) for number in range(holders * HOPS)]
            await asyncio.gather(
                *(asyncio.to_thread(ring._await_ready, number, node) for number, node in enumerate(nodes))
            )
            ring.client = await PlainClient.join(load_swarm(swarm.file), home=swarm.folder / "client")
            try:
                await ring._complete()
                yield ring
            finally:
                await ring.client.close()

    def _start(self, number: int) -> NodeProcess:
        """Start a node of hop `number` % HOPS; the first node also has the draft model or the oracle."""
        port, hop = free_port(), number % HOPS
        at = (
            "--host-maddr",
            f"/ip4/127.0.0.1/tcp/{port}",
            "--announce-maddr",
            f"/ip4/127.0.0.1/tcp/{self._relay.to(port)}",
        )
        span = "--span", f"{self._cuts[hop]}:{self._cuts[hop + 1]}"
        oracle = (sys.executable, str(Path(__file__).with_name("oracle_node.py")))
        wrapper = oracle if number == 0 and self._draft is None else ()
        lent = ("--draft-model", str(self._draft)) if number == 0 and self._draft is not None else ()
        options = (*span, *at, *lent, "--no-direct", "--dtype", "float32")
        return self._swarm.node(f"n{number}", *options, inside=wrapper)

    def _await_ready(self, number: int, node: NodeProcess) -> None:
        node.wait_for("ready")
        self._nodes[node.peer] = number

    async def _complete(self) -> None:
        """Wait until the client knows all nodes as ready."""
        while (
            sum(peer["state"] == "ready" and peer["span"][1] > 0 for peer in self.client.status()["peers"])
            < HOPS * self._holders
        ):
            await self.client.changed()

    async def run_with_loss(self, work: Work, drafts: str, place: int) -> Generation:
        """Generate a text whose hop at `place` is killed after KILLED_AFTER tokens. Returns the result after the node has started
        again."""
        stream = await self.client.stream(work.prompt, drafts=drafts, compress="none", **work.options)
        killed: int | None = None
        async for _ in stream:
            if killed is None and len(stream.result.ids) >= KILLED_AFTER:
                killed = self._nodes[stream.result.route[place].peer]
                self._process(killed).kill()
        if killed is not None:
            again = self._start(killed)
            await asyncio.to_thread(self._await_ready, killed, again)
            await self._complete()
        return stream.result

    def _process(self, number: int) -> NodeProcess:
        """Return the process that a node was started as last."""
        return [member for member in self._swarm.members if member.name == f"n{number}"][-1]

    async def run(self, works: Sequence[Work], drafts: str) -> tuple[list[Generation], float]:
        """Generate all `works` at once. Returns their results, and the seconds behind the first tokens if there is one work, else
        of all."""
        began_s = time.perf_counter()
        calls = (self.client.generate(work.prompt, drafts=drafts, compress="none", **work.options) for work in works)
        results = await asyncio.gather(*calls)
        whole_s = time.perf_counter() - began_s
        alone = results[0]
        return list(results), whole_s if len(works) > 1 else alone.seconds - alone.first_token_s

    async def gap(self, work: Work, place: int, one: Sequence[int], other: Sequence[int]) -> float | None:
        """Return by how much the log probabilities of two greedy texts' tokens at `place` differ. None for a sampled text, at the
        end of a text, or if one of the two is not among the LIKELIEST."""
        if work.options.get("temperature") or place >= min(len(one), len(other)):
            return None
        again = await self.client.generate(
            work.prompt, drafts="off", compress="none", logprobs=LIKELIEST, **work.options
        )
        known = {told.id: told.logprob for told in again.logprobs[place]}
        found = known.get(one[place]), known.get(other[place])
        return None if None in found else abs(found[0] - found[1])  # type: ignore[operator]

    async def ids(self, work: Work) -> list[int]:
        """Return the token ids of a prompt."""
        if isinstance(work.prompt, list):
            return work.prompt
        tokenizer = await self.client.tokenizer()
        assert tokenizer is not None
        return list(tokenizer.encode(work.prompt))

    async def pairs(self, works: Sequence[Sequence[Work]], drafts: str) -> Row:
        """Run each of `works` plainly and with `drafts`, in alternating order."""
        row = Row()
        for number, together in enumerate(works):
            runs: dict[str, tuple[list[Generation], float]] = {}
            ways = {"plain": "off", "drafted": drafts}
            for name in list(ways)[:: 1 if number % 2 else -1]:
                runs[name] = await self.run(together, ways[name])
            (plain, plain_s), (drafted, drafted_s) = runs["plain"], runs["drafted"]
            row.note(plain, drafted, (plain_s, drafted_s))
        return row

    async def with_oracle(self, works: Sequence[Sequence[Work]]) -> Row:
        """Run each of `works` plainly, and with a proposer that knows the text of that run."""
        row = Row()
        for together in works:
            plain, plain_s = await self.run(together, "off")
            known = [[*await self.ids(work), *one.ids] for work, one in zip(together, plain, strict=True)]
            self.texts.write_text(json.dumps(known))
            drafted, drafted_s = await self.run(together, "auto")
            row.note(plain, drafted, (plain_s, drafted_s))
        return row


@dataclass(frozen=True)
class Kind:
    """Kind of row: its prompts, how many run at once, the relays' delay (None: as `--delay-ms` says), the drafts, the number of
    holders of each hop, and how it is measured."""

    works: Callable[[int], list[Work]]
    copies: bool = False  # whether the copying model answers, else SmolLM2
    at_once: int = 1
    delay_s: float | None = None
    drafts: str = "lookup"
    draft_model: Callable[[], Path] | None = None  # of the first hop, instead of an oracle
    holders: int = 1
    measure: Callable[[Ring, Kind, argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]] = field(
        default_factory=lambda: speeds
    )


async def speeds(ring: Ring, kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the speed-up by drafts; unless `--no-oracle`, with an oracle's beside it."""
    found = kind.works(options.pairs if kind.at_once == 1 else kind.at_once)
    works = (
        [[work] for work in found] if kind.at_once == 1 else [(found * kind.at_once)[: kind.at_once]] * options.pairs
    )
    await ring.run(works[0], "off")  # connections are made, and speeds known
    row = (await ring.pairs(works, kind.drafts)).report()
    if options.oracle and kind.drafts != "off" and kind.draft_model is None:
        oracle = (await ring.with_oracle(works)).report()
        row["of_oracle"] = round(row["speed_up"] / oracle["speed_up"], 3)
        row["oracle"] = {name: oracle[name] for name in ("speed_up", "quartiles", "tokens_per_turn", "different")}
    return row


async def losses(ring: Ring, kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """Compare texts that lose a hop in their middle, without and with guesses."""
    works = kind.works(options.pairs)
    await ring.run(works[:1], "off")
    waits_s: dict[str, list[float]] = {"plain": [], "drafted": []}
    different, reroutes, tokens, accepted = [], 0, 0, 0
    for number, work in enumerate(works):
        plain = await ring.run_with_loss(work, "off", number % HOPS)
        drafted = await ring.run_with_loss(work, kind.drafts, number % HOPS)
        for name, one in (("plain", plain), ("drafted", drafted)):
            waits_s[name].append(round(one.longest_stall_s, 3))
            reroutes += one.reroutes
        tokens += len(drafted.ids)
        accepted += drafted.accepted_drafts
        if (place := first_difference(plain.ids, drafted.ids)) is not None:
            different.append({"at": place, "tokens": len(drafted.ids)})
    counts = {"tokens": tokens, "accepted": accepted, "reroutes": reroutes, "different": different}
    return {
        "longest_wait_s": waits_s,
        "median_s": {name: statistics.median(one) for name, one in waits_s.items()},
        **counts,
    }


async def same_texts(ring: Ring, kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the texts of `--tokens` tokens without and with guesses."""
    works = rounds(kind.works(PROMPTS))
    tokens = texts = accepted = wasted = 0
    different = []
    while tokens < options.tokens:
        together = list(itertools.islice(works, AT_ONCE))
        (plain, _), (drafted, _) = await ring.run(together, "off"), await ring.run(together, kind.drafts)
        for work, one, other in zip(together, plain, drafted, strict=True):
            texts, tokens = texts + 1, tokens + len(other.ids)
            accepted, wasted = accepted + other.accepted_drafts, wasted + other.wasted_drafts
            if (place := first_difference(one.ids, other.ids)) is not None:
                gap = await ring.gap(work, place, one.ids, other.ids)
                different.append({"at": place, "tokens": len(other.ids), "gap": gap})
    return {"tokens": tokens, "texts": texts, "accepted": accepted, "wasted": wasted, "different": different}


KINDS = {
    "edits": Kind(edits, copies=True),
    "tools": Kind(tools),
    "json": Kind(free_values),
    "free": Kind(questions),
    "off": Kind(questions, drafts="off"),
    "model": Kind(tasks, drafts="auto", draft_model=lambda: distilled(Recipe())),
    "edits_0ms": Kind(edits, copies=True, delay_s=0.0),
    "edits_8_sessions": Kind(edits, copies=True, at_once=8),
    "free_16_sessions_0ms": Kind(questions, at_once=16, delay_s=0.0),
    "killed": Kind(edits, copies=True, holders=2, measure=losses),
    "same_edits": Kind(edits, copies=True, delay_s=0.0, measure=same_texts),
    "same_tools": Kind(tools, delay_s=0.0, measure=same_texts),
    "same_json": Kind(free_values, delay_s=0.0, measure=same_texts),
    "same_free": Kind(questions, delay_s=0.0, measure=same_texts),
}


async def measured(kind: Kind, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row over a ring of its own."""
    delay_s = options.delay_ms / 1e3 if kind.delay_s is None else kind.delay_s
    draft = None if kind.draft_model is None else await asyncio.to_thread(kind.draft_model)
    async with Ring.over(model, delay_s, kind.holders, draft) as ring:
        return await kind.measure(ring, kind, options)


def turns_alone(ids: Sequence[int], prompt: Sequence[int], count: int) -> int:
    """Return the number of turns that a look-up needs for the answer `ids`, with `count` guesses a turn and without a network."""
    drafter = LookupDrafter()
    drafter.push(prompt)
    done = turns = 0
    while done < len(ids):
        proposed = drafter.propose((), count)
        right = next(
            (at for at, token in enumerate(proposed) if ids[done + at : done + at + 1] != [token]), len(proposed)
        )
        drafter.push(ids[done : done + right + 1])
        done, turns = done + right + 1, turns + 1
    return turns


def copies_alone(texts: int = 40, characters: int = 1200) -> dict[str, Any]:
    """Return the tokens of a turn by number of guesses, for edited copies in SmolLM2's tokens, without a model or a network."""
    model = trained(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    pairs = [(tokenizer(prompt).input_ids, tokenizer(copy).input_ids) for prompt, copy in held_out(texts, characters)]
    tokens = sum(len(copy) for _, copy in pairs)
    turns = {count: sum(turns_alone(copy, prompt, count) for prompt, copy in pairs) for count in (4, 8, 16)}
    return {
        "possible": {count: count + 1 for count in turns},
        "tokens_per_turn": {count: round(tokens / some, 2) for count, some in turns.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--delay-ms", type=float, default=25.0)
    parser.add_argument("--tokens", type=int, default=25_000, help="tokens of each row that compares texts")
    parser.add_argument("--copying", type=Path, help="folder of the copying model; by default trained and cached")
    parser.add_argument(
        "--no-oracle", dest="oracle", action="store_false", help="leave out the proposer that knows the text"
    )
    parser.add_argument("--alone", action="store_true", help="only count the turns of edited copies, without a network")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(copies_alone()))
        return
    report: dict[str, Any] = {}
    for name in options.rows:
        kind = KINDS[name]
        model = (options.copying or trained_model()) if kind.copies else trained(SMOLLM2)
        report[name] = uvloop.run(measured(kind, model, options))
        print(name, json.dumps(report[name]), file=sys.stderr)
    print(json.dumps({"pairs": options.pairs, "delay_ms": options.delay_ms, "rows": report}, indent=1))


if __name__ == "__main__":
    main()
