"""Answers by vLLM, where it is installed.

Knows: how to hand it prompts as ids, each with a temperature and seed of its own, in portions small enough that a kill
costs little. Refuses to know: prompts as text, files. What vLLM computes is its own affair: it rounds differently, and
a seed means something else to it, so its answers follow the same law but are other ones than those of `decode.batch`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from decode.batch import Progress, Task
from mtp.errors import UserError
from train.options import BaseOptions
from train.regenerate import Engine

PORTION = 512  # prompts that vLLM gets at once: it fills its batches itself, and idles only at the end of a portion


def require_vllm() -> Any:
    """The module, imported now. UserError if it is not there."""
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"--engine vllm needs vLLM, which cannot be imported ({error}); install it in this environment with "
            "`pip install vllm`, or use --engine mtp."
        ) from error
    return vllm


def vllm_engine(options: BaseOptions, model: str) -> Engine:
    """An engine over the base that `options` name, which lies at `model` (a folder, a file or a Hub id)."""
    vllm = require_vllm()
    try:
        llm = vllm.LLM(
            model=model,
            dtype=options.dtype,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            generation_config="vllm",  # none of the model's own defaults, such as a repetition penalty
        )
    except Exception as error:  # vLLM raises what it likes for a model, a device or a memory that it cannot use
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"--engine vllm cannot run base {options.name!r} ({first}); use --engine mtp.") from error

    def run(tasks: Sequence[Task], max_new_tokens: int, ends: Sequence[int]) -> Iterator[Progress]:
        for start in range(0, len(tasks), PORTION):
            portion = tasks[start : start + PORTION]
            settings = [_settings(vllm, task, max_new_tokens, ends) for task in portion]
            prompts = [{"prompt_token_ids": list(task.ids)} for task in portion]
            outputs = llm.generate(prompts, settings, use_tqdm=False)
            answers = [_ids(output.outputs[0], ends) for output in outputs]
            yield Progress(sum(map(len, answers)), list(zip(portion, answers, strict=True)))

    return run


def _settings(vllm: Any, task: Task, max_new_tokens: int, ends: Sequence[int]) -> Any:
    return vllm.SamplingParams(
        temperature=task.temperature,
        seed=task.seed,
        max_tokens=max_new_tokens,
        stop_token_ids=list(ends),
        detokenize=False,
    )


def _ids(completion: Any, ends: Sequence[int]) -> list[int]:
    """The ids with the token that ended the answer, which some releases leave out and name instead."""
    ids = [int(token) for token in completion.token_ids]
    ended = getattr(completion, "stop_reason", None)
    if completion.finish_reason == "stop" and not (ids and ids[-1] in ends):
        ids.append(ended if isinstance(ended, int) else ends[0])
    return ids
