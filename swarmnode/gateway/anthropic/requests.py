"""What Anthropic's clients ask for."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from swarmnode.gateway.anthropic.conversation import MessageParam, templated_blocks
from swarmnode.gateway.generation.sampling_fields import SamplingFields, check_type, checked_stops
from swarmnode.gateway.generation.tool_use import AUTO, MAX_TOOLS, NONE, REQUIRED, ToolUse, function_tool
from swarmnode.gateway.http.api_error import bad_request
from swarmnode.gateway.openai.conversation import MAX_MESSAGES, ContentPart, text_of

CHOICES = {"auto": AUTO, "any": REQUIRED, "tool": REQUIRED, "none": NONE}


class CustomTool(BaseModel):
    """A tool that the model may call."""

    type: str | None = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(BaseModel):
    """auto, any, none, or the tool of this name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(BaseModel):
    """enabled or disabled, where the template knows that."""

    type: str


class MessagesRequest(SamplingFields):
    """POST /v1/messages"""

    messages: list[MessageParam] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[ContentPart] | None = None
    stop_sequences: list[str] | None = None
    thinking: ThinkingOptions | None = None
    tools: list[CustomTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return checked_stops(self.stop_sequences or ())

    @property
    def tool_use(self) -> ToolUse:
        for tool in self.tools or ():
            check_type(tool.type, (None, "custom"), "custom ones are")
        tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()]
        choice = self.tool_choice or ToolChoice(type="auto")
        if choice.type not in CHOICES or (choice.type == "tool") != (choice.name is not None):
            raise bad_request("tool_choice is auto, any, none, or tool with a name", "tool_choice")
        parallel = not choice.disable_parallel_tool_use
        return ToolUse.choose(tools, CHOICES[choice.type], choice.name, parallel=parallel)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What else the template is told."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}

    def conversation(self) -> list[dict[str, Any]]:
        """As chat templates expect it. Raises ApiError."""
        begin = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        return [*begin, *templated_blocks(self.messages)]
