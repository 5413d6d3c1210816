"""From messages to a `PreparedRequest`: template, tokens, placeholder spans, processor cache. In the front process.

How the door calls it (see `builder.PromptBuilder` for the full docstrings):

    builder = load_prompt_builder(path, dtype="auto", overrides={}, processor_cache_bytes=512 * 2**20)
    request = await builder.prepare_chat(
        messages, tools=tools, sampling=sampling,
        media=plane, tier=tier, tenant="acme", request_id="chatcmpl-...", arrival_s=clock.started_s, clock=clock,
        cache_salt="", deadline_s=None, priority=0, template_options={}, add_generation_prompt=True,
    )
    request = await builder.prepare_completion("text" or [1, 2, 3], sampling=..., tenant=..., request_id=..., ...)
    counted = await builder.count_tokens(messages, tools=..., media=plane, tier=tier, tenant="acme")   # TokenCount

`messages` is a list of plain dicts in the OpenAI form: {"role", "content", "name"?, "tool_calls"?, "tool_call_id"?}.
`content` is a string, None, or a list whose elements are
    {"type": "text", "text": str}     text
    core.media.MediaRef               a picture, clip or sound, in place of the OpenAI part, in the part's order
    prompt.EmbedsPart                 precomputed embeddings in place of an `image_embeds` part
Nothing else: the door turns image_url, video_url, audio_url and input_audio into MediaRef, with `param` such as
"messages.0.content.1" and with `options` (detail, max_pixels, fps, num_frames: what the layout takes).

The `StageClock` is closed at REQUEST_PARSE (template and tokens), MEDIA_FETCH, MEDIA_DECODE and MM_PROCESSOR; a request
without media closes REQUEST_PARSE only. All errors are leaves of `core.errors`; template and length errors are
`PromptRefused`.

Back: `Detokenizer(tokenizer, stop=[...])` turns ids into text (`push(ids) -> str`, `finish() -> str`, `stopped`), and
`ToolCallStream(tool_style)` parts text from tool calls (`push(text) -> str`, `finish() -> (str, list[ToolCall])`).
"""

from triptych.prompt.detokenize import Detokenizer
from triptych.prompt.parts import EmbedsPart, TokenCount
from triptych.prompt.tools import ToolCall, ToolCallStream, ToolStyle, tool_style

__all__ = ["Detokenizer", "EmbedsPart", "TokenCount", "ToolCall", "ToolCallStream", "ToolStyle", "tool_style"]
