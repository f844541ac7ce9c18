from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from greenroom.workers.torch_host.engine.requests import Sampling
from greenroom.workers.torch_host.engine.sampling import (
    BatchSampler,
    SamplerOutput,
    SequenceSampler,
    allowed_by,
    open_masks,
    random_uniform,
)

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])


def chosen(
    logits: torch.Tensor, *samplings: Sampling, place: int = 5, prompt: list[int] | None = None
) -> SamplerOutput:
    choosers = BatchSampler([SequenceSampler(sampling, prompt or [], None) for sampling in samplings], CPU)
    return choosers.choose(logits.repeat(len(samplings), 1), torch.full((len(samplings),), place))


def frequencies(draws: int = 4000, logits: torch.Tensor = LOGITS, **sampling: Any) -> list[float]:
    """How often each token is chosen, over many places of one seed."""
    choosers = BatchSampler([SequenceSampler(Sampling(seed=11, **sampling), [], None)] * draws, CPU)
    tokens = choosers.choose(logits.repeat(draws, 1), torch.arange(draws)).tokens
    return (torch.bincount(tokens, minlength=logits.shape[0]) / draws).tolist()


def test_zero_temperature_takes_the_likeliest() -> None:
    assert chosen(LOGITS, Sampling(temperature=0.0)).tokens.tolist() == [0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    want = (LOGITS / temperature).softmax(-1).tolist()
    assert frequencies(temperature=temperature) == pytest.approx(want, abs=0.03)


def test_top_k_top_p_and_min_p_leave_only_the_likeliest() -> None:
    assert [share > 0 for share in frequencies(temperature=2.0, top_k=2)] == [True, True, False, False, False]
    # The first two have 0.87 of all: the second is needed to reach 0.7, a third is not.
    assert [share > 0 for share in frequencies(temperature=1.0, top_p=0.7)] == [True, True, False, False, False]
    assert [share > 0 for share in frequencies(temperature=1.0, min_p=0.1)] == [True, True, True, False, False]
    assert frequencies(temperature=1.0, top_p=1e-9)[0] == 1.0


def test_narrowed_choices_keep_their_proportions() -> None:
    want = LOGITS[:3].softmax(-1).tolist()
    assert frequencies(temperature=1.0, top_k=3)[:3] == pytest.approx(want, abs=0.03)


def test_order_of_the_vocabulary_does_not_matter() -> None:
    turned = frequencies(temperature=1.0, top_p=0.95, logits=LOGITS.flip(0))
    assert turned[::-1] == pytest.approx(frequencies(temperature=1.0, top_p=0.95), abs=0.05)


def test_a_seed_chooses_the_same_at_the_same_place_in_any_batch() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))
    seeded = Sampling(temperature=1.0, seed=5)
    narrowed = Sampling(temperature=1.0, top_p=0.8, seed=5)
    for place in range(20):
        alone = chosen(logits, seeded, place=place).tokens.tolist()
        around = chosen(logits, Sampling(), narrowed, seeded, Sampling(temperature=0.0), place=place).tokens.tolist()
        assert around[2] == alone[0]
        assert around[1] == chosen(logits, narrowed, place=place).tokens.tolist()[0]
        assert around[3] == int(logits.argmax())


def test_any_whole_number_is_a_seed() -> None:
    for seed in (0, -1, 2**63, 2**64 - 1, 10**30):
        chosen(LOGITS, Sampling(seed=seed))


def test_presence_and_frequency_weigh_what_was_said_and_not_the_prompt() -> None:
    chooser = SequenceSampler(Sampling(temperature=0.0, presence_penalty=0.4, frequency_penalty=0.35), [0, 1], None)
    choosers = BatchSampler([chooser], CPU)
    said = []
    for _ in range(4):
        chosen = choosers.choose(LOGITS[None].clone(), torch.zeros(1, dtype=torch.long))
        choosers.record(chosen.tokens)
        said.append(int(chosen.tokens))
    # 2.0, then 2 - 0.75 = 1.25 still leads 1.0, then 2 - 1.1 = 0.9 falls behind; then 1 - 0.75 = 0.25 does.
    assert said == [0, 0, 1, 0]


def test_repetition_weighs_the_prompt_too() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0])
    assert int(chosen(logits, Sampling(temperature=0.0, repetition_penalty=1.5), prompt=[0]).tokens) == 1
    assert int(chosen(-logits, Sampling(temperature=0.0, repetition_penalty=1.5), prompt=[2]).tokens) == 2
    assert (
        int(chosen(torch.tensor([-1.0, -1.2]), Sampling(temperature=0.0, repetition_penalty=1.5), prompt=[0]).tokens)
        == 1
    )


class Full(TorchDispatchMode):
    """So many operations find memory, and the next does not. `has_room`: in tensors that are there already it works."""

    def __init__(self, operations: int, has_room: bool = False) -> None:
        super().__init__()
        self.left, self.has_room = operations, has_room

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= not self.has_room or any(result.alias_info is None for result in func._schema.returns)
        if self.left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def test_a_choice_is_the_same_wherever_memory_ran_out_before() -> None:
    sampling = Sampling(temperature=0.0, repetition_penalty=3.0, frequency_penalty=0.5, logit_bias={4: 1.0}, logprobs=2)
    wanted = chosen(LOGITS, sampling, prompt=[0]).tokens
    assert wanted.tolist() == [1]
    for operations in range(200):
        choosers = BatchSampler([SequenceSampler(sampling, [0], None)], CPU)
        try:
            with Full(operations):
                choosers.choose(LOGITS[None], torch.tensor([5]))
        except torch.OutOfMemoryError:
            assert torch.equal(choosers.choose(LOGITS[None], torch.tensor([5])).tokens, wanted), operations
        else:
            return
    pytest.fail("it never ends")


def test_a_choice_is_noted_without_new_memory() -> None:
    """It would else be noted for some rows only when memory runs out, and twice for these when that is done again."""
    sampling = Sampling(temperature=0.0, frequency_penalty=0.5)
    choosers = BatchSampler([SequenceSampler(sampling, [], None), SequenceSampler(sampling, [], None)], CPU)
    for _ in range(3):
        tokens = choosers.choose(LOGITS.repeat(2, 1), torch.tensor([5, 5])).tokens
        with Full(0, has_room=True):
            choosers.record(tokens)
    assert tokens.tolist() == [0, 0]
    assert choosers.choose(LOGITS.repeat(2, 1), torch.tensor([5, 5])).tokens.tolist() == [1, 1]


def test_bias_moves_a_token_up_or_out() -> None:
    assert int(chosen(LOGITS, Sampling(temperature=0.0, logit_bias={3: 100.0})).tokens) == 3
    assert int(chosen(LOGITS, Sampling(temperature=0.0, logit_bias={0: -100.0})).tokens) == 1


def test_the_models_own_logits_are_never_changed() -> None:
    logits = LOGITS[None].clone()
    sampling = Sampling(temperature=1.0, logit_bias={0: -5.0}, presence_penalty=1.0, top_p=0.5)
    BatchSampler([SequenceSampler(sampling, [], None)], CPU).choose(logits, torch.zeros(1, dtype=torch.long))
    assert torch.equal(logits[0], LOGITS)


def test_logprobs_are_those_of_the_model_before_anything_was_changed() -> None:
    found = chosen(LOGITS, Sampling(temperature=0.0, logprobs=2, logit_bias={1: 50.0}))
    want = LOGITS.log_softmax(-1)
    assert found.logprobs is not None
    assert found.top_ids is not None
    assert found.tokens.tolist() == [1]
    assert found.logprobs.tolist() == pytest.approx([float(want[1])])
    assert found.top_ids.tolist() == [[0, 1]]


class Allows:
    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.is_done = False

    def fill(self, row: torch.Tensor) -> None:
        row.zero_()
        for token in self.tokens:
            bit = 1 << (token % 32)
            row[token // 32] |= bit - (1 << 32) if bit >= 1 << 31 else bit

    def accept(self, token: int) -> None:
        """Any of them, again and again."""


def test_a_mask_leaves_only_what_is_allowed_and_neighbours_free() -> None:
    logits = torch.arange(70, dtype=torch.float32)
    greedy = Sampling(temperature=0.0)
    bound = [
        SequenceSampler(greedy, [], Allows(3, 31, 64)),
        SequenceSampler(greedy, [], None),
        SequenceSampler(greedy, [], Allows(31)),
    ]
    masks = open_masks(3, 70)
    for sampler, mask in zip(bound, masks, strict=True):
        if sampler.constraint is not None:
            sampler.constraint.fill(mask)
    allowed = allowed_by(masks, 70)
    assert allowed[0].nonzero()[:, 0].tolist() == [3, 31, 64]
    assert bool(allowed[1].all())
    found = BatchSampler(bound, CPU).choose(logits.repeat(3, 1), torch.zeros(3, dtype=torch.long), masks)
    assert found.tokens.tolist() == [64, 69, 31]


def test_chance_is_even_and_differs_by_seed_and_by_place() -> None:
    places = torch.arange(20000)
    one = random_uniform(torch.full_like(places, 1), places)
    assert 0 <= float(one.min()) < float(one.max()) < 1
    counts = torch.histc(one.float(), bins=10, min=0, max=1) / 20000
    assert counts.tolist() == pytest.approx([0.1] * 10, abs=0.01)
    other = random_uniform(torch.full_like(places, 2), places)
    assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.03
    assert torch.equal(one, random_uniform(torch.full_like(places, 1), places))
