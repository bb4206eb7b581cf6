"""Scores of a prompt's own tokens, each given the tokens before it, for `echo` with logprobs and for evaluations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from swarmnode.codec.body import MAX_WANTED_POSITIONS
from swarmnode.codec.messages import Want
from swarmnode.codec.sampling import TokenLogprob
from swarmnode.compress.codecs import decode
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.session_spec import Received, ids_entry


async def score_prompt(
    session: ClientSession, prompt: Sequence[int], most_likely: int
) -> list[tuple[TokenLogprob, ...]]:
    """Return for each token except the first its own logprob, followed by those of the `most_likely` most likely tokens in its
    place. The driven session must have begun, and stays open."""
    size, scores = min(session.config.prompt_chunk_tokens, MAX_WANTED_POSITIONS), []
    for start in range(0, len(prompt) - 1, size):
        chunk = prompt[start : min(start + size, len(prompt) - 1)]
        entry = ids_entry(start, [chunk], Want.ALL)
        session.send(entry, expect=entry.end)
        received = await session.receive()
        drawn = prompt[start + 1 : start + 1 + len(chunk)]
        scores += await asyncio.to_thread(_scores, received, drawn, most_likely)
    return scores


def _scores(received: Received, drawn_T: Sequence[int], most_likely: int) -> list[tuple[TokenLogprob, ...]]:
    assert received.output.tensor is not None
    logits_TV = decode(received.output.tensor, received.payload)[0].float()
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    own_T = logprobs_TV.gather(1, torch.tensor(drawn_T)[:, None])[:, 0].tolist()
    best_TK = logprobs_TV.topk(min(most_likely, logprobs_TV.shape[1]), dim=-1)
    others = zip(best_TK.indices.tolist(), best_TK.values.tolist(), strict=True)
    return [
        (TokenLogprob(token, own), *map(TokenLogprob, ids, values))
        for token, own, (ids, values) in zip(drawn_T, own_T, others, strict=True)
    ]
