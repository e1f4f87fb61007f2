"""The text that stands for an image, or a video chunk, in the prompt of the language model. Pure.

What the checkpoints' own processors write: K3 with the original width x height of an image, K2.5 and its successors,
and Kimi-VL, whose markers are others. Each text holds one `<|media_pad|>`, which the engine of the language model
repeats to the number of tokens. Before a video chunk goes its start time, such as 00:00:02.000, which nobody told us.
`service.schemas` puts the text into every answer.
"""

from service.geometry import ImagePlan
from tp.spec import MODEL_TYPES, EncoderSpec, Family

_VIDEO = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
_IMAGE: dict[Family, str] = {
    "Kimi K3": "<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>",
    "Kimi K2.5": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    "Kimi-VL": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
}


def prompt_text(spec: EncoderSpec, plan: ImagePlan) -> str | None:
    """The placeholder for one item; None where the checkpoint is not of a model whose prompts we know."""
    if MODEL_TYPES.get(spec.model_type) != spec.family:
        return None
    if plan.num_frames is not None:
        return _VIDEO
    width, height = plan.original_size
    return _IMAGE[spec.family].format(width=width, height=height)
