"""Downloads from the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
# Subfolders hold the model once more, in other formats; consolidated files too.
_IGNORED = ["*/*", "consolidated*"]


def download(
    model_id: str, *, revision: str | None = None, cache_dir: str | None = None, with_weights: bool = True
) -> Path:
    """Fetch a model's files, or find them in the cache; PyTorch files only if there are no safetensors.

    Args:
      model_id: "organisation/name" on the hub.
      revision: branch, tag or commit.
      cache_dir: None for huggingface_hub's default.
      with_weights: False fetches config and tokenizer only.

    Returns: the local folder.
    Raises: ValueError if the hub does not have the model or does not let us; OSError if the hub cannot be reached.
    """

    def fetch(*weights: str) -> Path:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=[*_FILES, *weights],
                ignore_patterns=_IGNORED,
            )
        )

    try:
        if not with_weights:
            return fetch()
        folder = fetch("*.safetensors")
        if not any(folder.glob("*.safetensors")):
            folder = fetch("pytorch_model*.bin")
    except GatedRepoError as error:
        raise ValueError(
            f"model {model_id!r} is gated: accept its terms on https://huggingface.co/{model_id} and log in with "
            "`hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"model {model_id!r} has no revision {revision!r} on the hub") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"model {model_id!r} is neither a local folder or .gguf file nor a model on the Hugging Face hub; correct "
            "the name, or log in with `hf auth login` if it is private"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise OSError(
            f"model {model_id!r} is not cached and the Hugging Face hub cannot be reached ({type(error).__name__}); "
            "connect, or give a local folder or .gguf file"
        ) from error
    return folder
