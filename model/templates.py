"""The chat templates under which the released models were trained.

Source: `diffusers` QwenImagePipeline.prompt_template_encode.
"""

TEXT_TO_IMAGE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
# Source: `diffusers` QwenImageEditPlusPipeline.prompt_template_encode.
EDIT_PREFIX = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new "
    "image that meets the user's requirements while maintaining consistency with the original input where "
    "appropriate.<|im_end|>\n<|im_start|>user\n"
)
# One for each reference, before the instruction.  The first edit model, for one reference, has no label.
PICTURE_LABEL = "Picture {number}: "
VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
END_OF_TURN = "<|im_end|>"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS = 1024  # of a caption's text states, suffix included
