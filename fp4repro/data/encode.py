"""Documents to tokens, an end of text after each; packed sequences are cut from such a row of documents."""

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from fp4repro.data.documents import Document
from fp4repro.data.tokenizer import end_of_text, token_bytes
from fp4repro.errors import Fp4ReproError

_AT_ONCE = 64


def encoded(
    documents: Iterable[Document], tokenizer: Tokenizer, dtype: np.dtype
) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its tokens (tokens,), which stand for its bytes and no others."""
    end, lengths = end_of_text(tokenizer), token_bytes(tokenizer)
    # A few at a time: what the library returns takes many times the room of the tokens.
    stream = iter(documents)
    while few := list(islice(stream, _AT_ONCE)):
        texts = [document.text for document in few]
        pieces = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for document, piece in zip(few, pieces, strict=True):
            tokens = np.array([*piece.ids, end], dtype)
            if lengths[tokens].sum() != document.nbytes:
                raise Fp4ReproError(
                    f"the tokenizer changes text: its tokens of {document.name} stand for "
                    f"{lengths[tokens].sum()} bytes, and the document has {document.nbytes}; name another one"
                )
            yield document, tokens
