"""The formats there are, by name. Knows: only that list. Refuses to know: how any of them works."""

from mtp.formats.custom_generate import CUSTOM_GENERATE
from mtp.formats.eagle3 import EAGLE3, SPECULATORS
from mtp.formats.interface import Format
from mtp.formats.medusa import MEDUSA, VLLM_MEDUSA

FORMATS: dict[str, Format] = {one.name: one for one in (VLLM_MEDUSA, EAGLE3, SPECULATORS, MEDUSA, CUSTOM_GENERATE)}
