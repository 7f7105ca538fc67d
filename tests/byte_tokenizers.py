"""Byte-level tokenizers made in code, as transformers opens them."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|turn|>"]
PLAIN_TEMPLATE = (
    "<s>You are a user of a tool.{% for message in messages %}<|turn|>{{ message['role'] }}\n"
    "{{ message['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = None, wrap: str | None = None, merges: int = 1
) -> PreTrainedTokenizerFast:
    """Byte-level, with `merges` merged pairs; `wrap` is what special tokens stand around a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet, *["th", "an"][:merges]])}
    backend = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("a", "n")][:merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if wrap is not None:
        specials = [(token, vocabulary[token]) for token in SPECIAL[:2]]
        backend.post_processor = processors.TemplateProcessing(single=wrap, special_tokens=specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|turn|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=True,
    )
