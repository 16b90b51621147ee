"""Downloads files of data sets from the Hugging Face hub, with a progress bar; they stay in the hub's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ADVICE = (
    "where there is no network, fetch it elsewhere with `hf download {repo} {file} --repo-type dataset --local-dir "
    "FOLDER` and name the file; a mirror is named by HF_ENDPOINT, a token by HF_TOKEN"
)


def fetch(repo: str, file: str, revision: str | None = None) -> Path:
    """The local copy of a file of the data set `repo`, downloaded at its first use.

    Raises FileNotFoundError, which says what to do, if the hub does not give it.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # slow to import

    if not isinstance(try_to_load_from_cache(repo, file, repo_type="dataset", revision=revision), str):
        # Not by logging, which is not set up before a run starts; a terminal gets the hub's progress bar, too.
        sys.stderr.write(f"downloading {file} of the data set {repo} from the Hugging Face hub, into its cache\n")
    endpoint = os.environ.get("HF_ENDPOINT") or None  # the library reads the variable only when it is imported
    try:
        path = hf_hub_download(repo, file, repo_type="dataset", revision=revision, endpoint=endpoint)
    except Exception as error:  # of many libraries: network, disk, the hub's own refusals
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FileNotFoundError(
            f"no file {repo}/{file} here, and the Hugging Face hub did not give {file} of the data set {repo}: "
            f"{reason}; " + ADVICE.format(repo=repo, file=file)
        ) from error
    return Path(path)
