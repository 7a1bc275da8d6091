"""Mutants of how the bundled checkpoint is made and marked."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM = "core/models/bundled/"
CHECKPOINT = "tests/models/test_bundled.py::"
TRAINING = "tests/models/test_bundled_training.py::"

TEACHING: tuple[Mutant, ...] = (
    Mutant(
        "bundled-model-beside-the-caller",
        "the bundled model is found from any working directory",
        ROOM + "__init__.py",
        "Path(__file__).resolve().parent",
        'Path("core/models/bundled")',
        CHECKPOINT + "test_folder_is_complete_and_small",
    ),
    Mutant(
        "held-out-sums-are-taught",
        "sums that the model is judged by never occur in its training",
        ROOM + "corpus.py",
        "if (a, b) not in held_out)",
        "if (b, a) not in held_out or a < b)",
        CHECKPOINT + "test_held_out_sums_never_occur_in_training",
    ),
    Mutant(
        "unstopped-sums-are-right",
        "a sum counts as right only with its stop token",
        ROOM + "evaluate.py",
        'wanted = [f"{a + b}{tokenizer.eos_token}" for a, b in pairs]\n    return sum(got == want',
        'wanted = [f"{a + b}{tokenizer.eos_token}" for a, b in pairs]\n    return sum(want.startswith(got)',
        TRAINING + "test_a_sum_is_right_with_its_digits_and_its_stop_and_nothing_else[46-0]",
    ),
    Mutant(
        "documents-see-each-other",
        "a training document sees none of those that share its row",
        ROOM + "packing.py",
        "(same & causal)[:, None]",
        "(same | causal)[:, None]",
        TRAINING + "test_a_document_sees_itself_up_to_each_token_and_no_other",
    ),
    Mutant(
        "documents-guess-their-neighbour",
        "the first token of a training document is the target of none",
        ROOM + "packing.py",
        "                weights[row, used] = 0.0  # its target would be set by the document before\n",
        "",
        TRAINING + "test_answers_weigh_more_than_prompts_and_first_tokens_and_padding_nothing",
    ),
    Mutant(
        "story-ends-with-another-animal",
        "a story keeps to the animal of its prompt",
        ROOM + "story.py",
        "The end. {ANIMALS[animal]}",
        "The end. {ANIMALS[other]}",
        TRAINING + "test_a_story_keeps_to_the_hero_and_the_animal_of_its_prompt",
    ),
    Mutant(
        "template-forgets-the-stop",
        "the chat template renders what was trained on, the stop token included",
        ROOM + "tokenization.py",
        "{{ message['content'] }}{{ eos_token }}",
        "{{ message['content'] }}<|end|>",
        CHECKPOINT + "test_checkpoint_tokenizer_is_what_the_repository_builds",
    ),
    Mutant(
        "weights-of-the-token-before",
        "the loss weighs each token by its own weight",
        ROOM + "train.py",
        "batch.weights[:, 1:]\n",
        "batch.weights[:, :-1]\n",
        TRAINING + "test_the_loss_is_of_next_tokens_by_their_own_weights",
    ),
    Mutant(
        "warm-up-begins-at-the-peak",
        "the learning rate rises to its peak",
        ROOM + "train.py",
        "return PEAK_RATE * (step + 1) / WARMUP_STEPS",
        "return PEAK_RATE",
        TRAINING + "test_the_rate_rises_to_its_peak_and_falls_to_its_end",
    ),
)
