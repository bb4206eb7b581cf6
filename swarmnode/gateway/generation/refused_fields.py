"""Fields of OpenAI's, Anthropic's, vLLM's and llama.cpp's APIs that the gateway does not support and that would change an answer. A
request with such a field is refused, unless the value asks for what happens anyway. Fields that change no answer are ignored: see
docs/api.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmnode.gateway.http.api_error import bad_request

FORMATS = "use response_format or grammar to constrain the text"
BEAMS = "texts are sampled token by token, without beams"
ONLY_TEXT = "models here read and write only text"
OTHER_DRAWING = "use temperature, top_p, top_k, min_p and the penalties"
ONLY_BIASES = "use logit_bias or a grammar to allow or forbid tokens"

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {  # by field: the values that ask for nothing, and the reason
    "use_beam_search": ((False,), BEAMS),
    "length_penalty": ((1,), BEAMS),
    "early_stopping": ((False,), BEAMS),
    "include_stop_str_in_output": ((False,), "the text always ends before its stop string"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself: the gateway cuts none"),
    "prompt_logprobs": ((), "use echo with logprobs of /v1/completions for logprobs of a prompt"),
    "allowed_token_ids": ((), ONLY_BIASES),
    "bad_words": (([],), ONLY_BIASES),
    "logits_processors": (([],), ONLY_BIASES),
    "guided_json": ((), FORMATS),
    "guided_regex": ((), FORMATS),
    "guided_choice": ((), FORMATS),
    "guided_grammar": ((), FORMATS),
    "structured_outputs": ((), FORMATS),
    "json_schema": ((), FORMATS),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tools and tool_choice"),
    "modalities": ((["text"],), ONLY_TEXT),
    "audio": ((), ONLY_TEXT),
    "web_search_options": ((), "models here cannot search: offer a tool that does"),
    "documents": (([],), "write the documents into a message"),
    "chat_template": ((), "the model's own chat template is always used"),
    "mm_processor_kwargs": ((), ONLY_TEXT),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "spaces_between_special_tokens": ((True,), "texts are always written as the tokenizer writes them"),
    "thinking_token_budget": ((), "use max_tokens, which also bounds the reasoning"),
    "container": ((), "the gateway runs no containers"),
    "mcp_servers": (([],), "the gateway calls no servers: offer tools"),
    "typical_p": ((1,), OTHER_DRAWING),
    "tfs_z": ((1,), OTHER_DRAWING),
    "top_a": ((0,), OTHER_DRAWING),
    "mirostat": ((0,), OTHER_DRAWING),
    "dry_multiplier": ((0,), OTHER_DRAWING),
    "xtc_probability": ((0,), OTHER_DRAWING),
    "dynatemp_range": ((0,), OTHER_DRAWING),
    "repetition_detection": ((), "use stop strings and max_tokens to end a text"),
    "n_predict": ((), "use max_tokens"),
}


def check_refused(told: Mapping[str, Any]) -> None:
    """Raise ApiError if one of the fields in `told` is in `REFUSED` and its value asks for something unsupported."""
    for field in told.keys() & REFUSED.keys():
        anyway, why = REFUSED[field]
        if told[field] is not None and told[field] not in anyway:
            raise bad_request(f"{field} is not supported: {why}", field)
