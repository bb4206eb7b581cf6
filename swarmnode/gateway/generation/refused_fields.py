"""Fields of OpenAI's, Anthropic's, vLLM's and llama.cpp's APIs that are not done here, and would change an answer: a request with
one is refused, unless it says there what happens anyway. What changes no answer is ignored: see docs/api.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmnode.gateway.http.api_error import bad_request

FORMATS = "say what the text shall follow by response_format or grammar"
BEAMS = "texts are drawn here token after token, without beams"
ONLY_TEXT = "a model here reads and writes text"
OTHER_DRAWING = "tokens are drawn by temperature, top_p, top_k, min_p and penalties"
ONLY_BIASES = "which tokens may be drawn is said by logit_bias or a grammar"

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {  # of each, what is no wish, and why it is refused
    "use_beam_search": ((False,), BEAMS),
    "length_penalty": ((1,), BEAMS),
    "early_stopping": ((False,), BEAMS),
    "include_stop_str_in_output": ((False,), "a text ends before its stop string"),
    "truncate_prompt_tokens": ((), "a prompt is taken whole or refused"),
    "prompt_logprobs": ((), "logprobs of a prompt are told by echo with logprobs, of /v1/completions"),
    "allowed_token_ids": ((), ONLY_BIASES),
    "bad_words": (([],), ONLY_BIASES),
    "logits_processors": (([],), ONLY_BIASES),
    "guided_json": ((), FORMATS),
    "guided_regex": ((), FORMATS),
    "guided_choice": ((), FORMATS),
    "guided_grammar": ((), FORMATS),
    "structured_outputs": ((), FORMATS),
    "json_schema": ((), FORMATS),
    "functions": (([],), "offer them as tools"),
    "function_call": (("none", "auto"), "say it by tools and tool_choice"),
    "modalities": ((["text"],), ONLY_TEXT),
    "audio": ((), ONLY_TEXT),
    "web_search_options": ((), "a model here searches nothing: offer it a tool that does"),
    "documents": (([],), "write them into a message"),
    "chat_template": ((), "conversations are written by the model's own chat template"),
    "mm_processor_kwargs": ((), ONLY_TEXT),
    "return_tokens_as_token_ids": ((False,), "ask for return_token_ids"),
    "spaces_between_special_tokens": ((True,), "texts are written as the tokenizer writes them"),
    "thinking_token_budget": ((), "how long a model thinks is bounded by max_tokens alone"),
    "container": ((), "nothing is run here"),
    "mcp_servers": (([],), "nothing is called from here: offer tools"),
    "typical_p": ((1,), OTHER_DRAWING),
    "tfs_z": ((1,), OTHER_DRAWING),
    "top_a": ((0,), OTHER_DRAWING),
    "mirostat": ((0,), OTHER_DRAWING),
    "dry_multiplier": ((0,), OTHER_DRAWING),
    "xtc_probability": ((0,), OTHER_DRAWING),
    "dynatemp_range": ((0,), OTHER_DRAWING),
    "repetition_detection": ((), "a text ends at its end tokens, stop strings and max_tokens"),
    "n_predict": ((), "say it by max_tokens"),
}


def check_refused(told: Mapping[str, Any]) -> None:
    """Raise ApiError where one of these fields says something that is not done."""
    for field in told.keys() & REFUSED.keys():
        anyway, why = REFUSED[field]
        if told[field] is not None and told[field] not in anyway:
            raise bad_request(f"{field} is not possible here: {why}", field)
