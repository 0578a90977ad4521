"""Text: of the standard library, of files, of the Hugging Face Hub; held in memory or streamed; bytes or tokens."""

from __future__ import annotations

from models.transformer.config import FilesConfig, HubConfig, StdlibConfig
from models.transformer.data.corpus import Corpus, Encoded, encode_all, split_corpus, whole_corpus
from models.transformer.data.documents import Part, documents, file_parts, find_files
from models.transformer.data.hub import hub_part
from models.transformer.data.stdlib import stdlib_corpus, stdlib_root
from models.transformer.data.stream import Stream
from models.transformer.data.tokens import Tokenizer, load_tokenizer
from models.transformer.data.windows import consecutive_windows, random_windows

__all__ = ["Corpus", "Stream", "Tokenizer", "consecutive_windows", "load", "random_windows"]


def load(config: StdlibConfig | FilesConfig | HubConfig, seed: int) -> Corpus | Stream:
    """The text that a configuration names: in memory, or as a stream whose order is that of the seed.

    Raises OSError and ValueError, naming the key or the file, for text that is not there, is empty or cannot be read.
    """
    if isinstance(config, StdlibConfig):
        return stdlib_corpus(stdlib_root(), config.validation_fraction)
    tokenizer = load_tokenizer(config.tokenizer)
    parts, validation_parts, origin, validation_origin = _sources(config)
    if config.streaming:
        return Stream(
            parts,
            validation_parts,
            tokenizer,
            fraction=config.validation_fraction,
            validation_bytes=config.validation_bytes,
            shuffle_buffer=config.shuffle_buffer,
            seed=seed,
            origin=origin,
            validation_origin=validation_origin,
        )
    encoded = _encoded(parts, tokenizer, origin)
    if validation_parts is None:
        return split_corpus(encoded, config.validation_fraction, tokenizer, origin)
    validation = _encoded(validation_parts, tokenizer, validation_origin)
    return whole_corpus(encoded, validation, tokenizer, origin, validation_origin)


def _sources(config: FilesConfig | HubConfig) -> tuple[list[Part], list[Part] | None, str, str]:
    """Training parts, those of validation if they are apart, and what messages call each."""
    if isinstance(config, FilesConfig):
        files = find_files(config.path, config.format, "data.path")
        origin, validation_origin = _described(config.path), _described(config.validation_path)
        parts = file_parts(files, config.field)
        if config.validation_path is None:
            return parts, None, origin, origin
        held_out = find_files(config.validation_path, config.format, "data.validation_path")
        return parts, file_parts(held_out, config.field), origin, validation_origin

    def part(split: str, key: str) -> list[Part]:
        assert isinstance(config, HubConfig) and config.name is not None
        return [hub_part(config.name, config.config, split, config.field, config.streaming, key)]

    origin, validation_origin = f"{config.name} ({config.split})", f"{config.name} ({config.validation_split})"
    parts = part(config.split, "data.split")
    if config.validation_split is None:
        return parts, None, origin, origin
    return parts, part(config.validation_split, "data.validation_split"), origin, validation_origin


def _described(paths: object) -> str:
    return paths if isinstance(paths, str) else ", ".join(map(str, paths)) if isinstance(paths, list) else str(paths)


def _encoded(parts: list[Part], tokenizer: Tokenizer, origin: str) -> Encoded:
    encoded = encode_all(documents(parts), tokenizer)
    if not encoded.tokens:
        raise ValueError(f"{origin}: there is no text in it")
    return encoded
