"""The vision part of a checkpoint on a Hugging Face hub: `tpvision fetch`.

    revision -> commit -> config files and index -> the files that the index names for vision tensors -> slim folder

Files go to the hub library's own cache folder, and come from it where they are there, so HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE mean what they mean everywhere. service/hub_download.py brings the large files,
service/extract.py writes the folder. Whole files, not the byte ranges of tensors: only a whole file has a checksum.
Needs the extra `fetch`; the front-end does not import it.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from service.extract import (
    CONFIG_NAMES,
    Origin,
    Slim,
    check_space,
    check_writable,
    extract,
    file_sha256,
    is_whole,
    open_slim,
    other_content,
    read_provenance,
    refuse_foreign,
)
from service.file_progress import shown
from service.hub_download import SHA256, FetchError, RemoteFile, check, download
from tp.checkpoint import INDEX_NAME, check_index, vision_files
from tp.spec import read_spec

log = logging.getLogger("tpvision.fetch")


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch did."""

    slim: Slim
    repo: str
    commit: str
    num_needed: int  # files that hold vision tensors
    needed_bytes: int
    downloaded_bytes: int  # of them, now
    repo_bytes: int | None  # everything that the commit holds; None offline


@dataclass(frozen=True, slots=True)
class _Commit:
    """A repository at one commit. `files` is None offline."""

    repo: str
    commit: str
    snapshot: Path  # where the cache shows the commit's files
    files: Mapping[str, RemoteFile] | None

    def cached(self, name: str) -> Path:
        """A file in the cache, downloaded by the library where it is not there."""
        with _readable(self.repo):
            return Path(hf_hub_download(self.repo, name, revision=self.commit))


def fetch_model(repo: str, out: Path, *, revision: str | None = None) -> Fetched:
    """Write the vision part of hub repository `repo` at `revision` (default: its main branch) into folder `out`.

    Does nothing where `out` holds it already. Raises FetchError or ExtractError, or SpecError or CheckpointError where
    what the repository holds is not an encoder that we know.
    """
    _quieten()
    _check_environment()
    refuse_foreign(out)
    revision = revision or constants.DEFAULT_REVISION
    with _worded(repo, revision):
        commit = _pin(repo, revision)
        log.info("%s: commit %s", repo, commit.commit)
        _download_small_files(commit)
        check_index(commit.snapshot, read_spec(commit.snapshot))
        needed = [_describe(commit, name) for name in _needed_names(commit)]
        if slim := _already(out, commit, needed):
            return _fetched(slim, commit, needed, 0)
        check_writable(out)
        missing = [remote for remote in needed if not remote.is_cached]
        log.info("%d file(s) hold the vision tensors, %d of them to download", len(needed), len(missing))
        downloaded_bytes = _download(missing)
        verified = _verify(commit, needed, checked={remote.blob.resolve() for remote in missing})
    with shown("writing") as report:
        slim = extract(commit.snapshot, out, origin=Origin(repo, commit.commit, verified), report=report)
    return _fetched(slim, commit, needed, downloaded_bytes)


def _quieten() -> None:
    """The libraries' own lines show URLs, which may be signed, and a bar for each small file."""
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _pin(repo: str, revision: str) -> _Commit:
    """The commit that `revision` is now. Every later request names the commit, so that nothing moves under us.

    The library notes in its cache which commit it found, for the next time offline; so what it found is what counts.
    """
    with _readable(repo):
        ask = partial(HfApi(library_name="tpvision").model_info, repo, files_metadata=True)
        info = None if constants.is_offline_mode() else ask(revision=revision)
        snapshot = Path(hf_hub_download(repo, CONFIG_NAMES[0], revision=revision)).parent
        commit = snapshot.name
        if info is None:
            return _Commit(repo, commit, snapshot, None)
        if info.sha != commit:  # the branch has moved since
            info = ask(revision=commit)
        files = [
            RemoteFile(repo, commit, item.rfilename, item.size or 0, item.lfs.sha256.lower() if item.lfs else None)
            for item in info.siblings or ()
        ]
    return _Commit(repo, commit, snapshot, {file.name: file for file in files})


def _download_small_files(commit: _Commit) -> None:
    for name in CONFIG_NAMES[1:]:
        commit.cached(name)
    if commit.files is not None and INDEX_NAME in commit.files:
        commit.cached(INDEX_NAME)


def _needed_names(commit: _Commit) -> list[str]:
    """Files that hold vision tensors; where there is no index, all safetensors, of which there is mostly one."""
    if commit.files is None or INDEX_NAME in commit.files:
        return [path.name for path in vision_files(commit.snapshot)]
    names = sorted(name for name in commit.files if name.endswith(".safetensors") and "/" not in name)
    if not names:
        raise FetchError(f"{commit.repo} at {commit.commit} holds neither {INDEX_NAME} nor a .safetensors file")
    return ["model.safetensors"] if "model.safetensors" in names else names


def _describe(commit: _Commit, name: str) -> RemoteFile:
    if commit.files is None:
        return _describe_cached(commit, name)
    remote = commit.files.get(name)
    if remote is None:
        raise FetchError(f"{commit.repo} at {commit.commit} has no {name}, which its index names for vision tensors")
    if remote.sha256 is None:
        raise FetchError(f"{name}: the hub gives no SHA-256, so what comes could not be checked")
    return remote


def _describe_cached(commit: _Commit, name: str) -> RemoteFile:
    """Offline. The cache calls a large file by its SHA-256, where the file system has links."""
    path = commit.cached(name)
    blob = path.resolve()
    sha256 = blob.name if SHA256.fullmatch(blob.name) else None
    return RemoteFile(commit.repo, commit.commit, name, path.stat().st_size, sha256)


def _already(out: Path, commit: _Commit, needed: list[RemoteFile]) -> Slim | None:
    """What is in `out`, if it was made of the same files and is whole: then nothing needs to be downloaded.

    Raises ExtractError where it was made of others.
    """
    found = read_provenance(out)
    if found is None:
        return None
    there, here = {file.sha256 for file in found.source_files}, {remote.sha256 for remote in needed}
    are_known = None not in there | here
    has_configs = all(found.sha256.get(name) == file_sha256(commit.snapshot / name) for name in CONFIG_NAMES)
    if not has_configs or (are_known and there != here):
        raise other_content(out, found, f"{commit.repo} at {commit.commit}")
    return open_slim(out, found, is_new=False) if are_known and is_whole(out, found) else None


def _fetched(slim: Slim, commit: _Commit, needed: list[RemoteFile], downloaded_bytes: int) -> Fetched:
    return Fetched(
        slim=slim,
        repo=commit.repo,
        commit=commit.commit,
        num_needed=len(needed),
        needed_bytes=sum(remote.num_bytes for remote in needed),
        downloaded_bytes=downloaded_bytes,
        repo_bytes=None if commit.files is None else sum(remote.num_bytes for remote in commit.files.values()),
    )


def _download(missing: list[RemoteFile]) -> int:
    """Each file into the cache; the bytes that this took."""
    total, behind, received = sum(remote.num_bytes for remote in missing), 0, 0
    check_space(Path(constants.HF_HUB_CACHE), sum(remote.missing_bytes for remote in missing))
    with shown("downloading") as report:
        for remote in missing:
            received += download(remote, partial(_advance, report, behind, total))
            behind += remote.num_bytes
    return received


def _advance(report: Any, behind: int, total: int, done: int) -> None:
    report(behind + done, total)


def _verify(commit: _Commit, needed: list[RemoteFile], checked: set[Path]) -> dict[str, str]:
    """Link each file into the commit's folder, and check those that were there before; the checksums by file name."""
    verified, faults = {}, []
    for remote in needed:
        path = commit.cached(remote.name)
        if remote.sha256 is None:
            log.warning("%s: the cache does not say its SHA-256, so it is not checked", remote.name)
            continue
        if path.resolve() not in checked:
            try:
                check(path, remote)
            except FetchError as error:
                faults.append(str(error))
        verified[remote.name] = remote.sha256
    if faults:
        raise FetchError("; ".join(faults))
    return verified


def _check_environment() -> None:
    """Raise FetchError for what the library would fail at with other errors."""
    try:
        endpoint = httpx2.URL(constants.ENDPOINT)
    except httpx2.InvalidURL:
        endpoint = httpx2.URL()
    if endpoint.scheme not in ("http", "https") or not endpoint.host:
        raise FetchError("HF_ENDPOINT is not an http or https URL")
    if not (get_token() or "").isascii():
        raise FetchError("the token given (HF_TOKEN) holds a character that no token has")


@contextmanager
def _readable(repo: str) -> Iterator[None]:
    """Around the library, which trusts in the shape of what it is told: what it trips over, as one line of ours."""
    try:
        yield
    except (FetchError, HFValidationError):
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FetchError(
            f"what {httpx2.URL(constants.ENDPOINT).host} says of {repo} is not what a hub says ({type(error).__name__})"
        ) from None


@contextmanager
def _worded(repo: str, revision: str) -> Iterator[None]:
    """Foreign errors as one line of ours, without what a server or a library said: that may hold signed URLs."""
    try:
        yield
    except (HfHubHTTPError, httpx2.HTTPError, EntryNotFoundError, HFValidationError, OfflineModeIsEnabled) as error:
        raise FetchError(_explain(error, repo, revision)) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise FetchError(f"downloading {repo}: {where}{error.strerror or type(error).__name__}") from None


def _explain(error: Exception, repo: str, revision: str) -> str:
    hub = httpx2.URL(constants.ENDPOINT).host
    access = "the token given has no access to it" if get_token() else "no token is given (HF_TOKEN)"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    offline = f"HF_HUB_OFFLINE is set, and the cache in {constants.HF_HUB_CACHE} does not hold {repo} at {revision}"
    lost = f"{hub} cannot be reached, or the connection was lost ({type(error).__name__}); run it again to go on"
    messages: dict[type[Exception], str] = {  # the first that fits
        OfflineModeIsEnabled: offline,
        LocalEntryNotFoundError: offline if constants.is_offline_mode() else lost,
        GatedRepoError: f"{repo} is gated: accept its terms on {hub}; {access}",
        RepositoryNotFoundError: f"{hub} shows no {repo}: it does not exist, or it is private and {access}",
        RevisionNotFoundError: f"{repo} has no revision {revision}",
        EntryNotFoundError: f"{repo} at {revision} lacks {' or '.join(CONFIG_NAMES)}",
        HFValidationError: f"{repo!r} is not a repository's name, such as moonshotai/Kimi-K3",
        HfHubHTTPError: f"{hub} answered {status} for {repo} at {revision}",
        Exception: lost,
    }
    return next(message for kind, message in messages.items() if isinstance(error, kind))
