"""Keys and signatures: DSSE through securesystemslib, folders through OpenSSF's model-signing; both offline, with a key of the user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mpbridge.common.errors import BadValue, Refused, cut
from mpbridge.common.files import bytes_of, drop_partials, text_of, why, write_whole
from mpbridge.common.shipped import install

MAKE = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem && openssl pkey -in key.pem -pubout -out key.pub"
"""How to make a key that both formats accept."""


@dataclass(frozen=True, slots=True)
class Signer:
    """A key: to sign with if it is private, else to verify with."""

    path: Path
    public: Any
    """securesystemslib's SSlibKey."""
    private: Any = None
    """cryptography's private key."""

    @property
    def id(self) -> str:
        """The key's id: a SHA-256 of its public part."""
        return str(self.public.keyid)

    def envelope(self, statement: Mapping[str, Any], kind: str) -> str:
        """The statement in a signed DSSE envelope, as a line of JSON."""
        from securesystemslib.dsse import Envelope
        from securesystemslib.signer import CryptoSigner

        made = Envelope(json.dumps(statement, sort_keys=True).encode(), kind, {})
        made.sign(CryptoSigner(self.private, self.public))
        return json.dumps(made.to_dict())

    def opened(self, line: bytes, kind: str) -> tuple[str, bytes]:
        """(fault, payload) of an envelope; fault is '' if this key signed exactly this payload."""
        from securesystemslib.dsse import Envelope
        from securesystemslib.exceptions import VerificationError

        try:
            envelope = Envelope.from_dict(json.loads(line, object_pairs_hook=_without_repeats))
        except Exception as error:  # whatever a stranger's line makes the library raise
            return f"it is no DSSE envelope ({type(error).__name__})", b""
        if envelope.payload_type != kind:
            return f"its payload is {str(envelope.payload_type)[:60]!r}, expected {kind!r}", b""
        if self.id not in envelope.signatures:
            others = ", ".join(sorted(str(one)[:12] for one in envelope.signatures)) or "nobody"
            return f"it is signed by {others}, not by the key {self.id[:12]} of {self.path.name}", b""
        try:
            envelope.verify([self.public], 1)
        except VerificationError:
            return "its signature does not fit its content, which was changed after it was signed", b""
        return "", envelope.payload


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values of one key some parsers take the first one."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def read_key(path: Path, *, private: bool) -> Signer:
    """The key in a PEM file: Ed25519, ECDSA or RSA. Raises BadValue for anything else, Refused without the extra `disclose`."""
    try:
        from cryptography.hazmat.primitives import serialization
        from securesystemslib.signer import SSlibKey
    except ImportError as error:
        raise Refused(f"signatures need the package {error.name}: {install('disclose')}") from None
    try:
        data = bytes_of(path, kind="text")
    except OSError as error:
        raise BadValue(f"{path}: {why(error)} (a key pair: {MAKE})") from None
    try:
        key: Any = (
            serialization.load_pem_private_key(data, None) if private else serialization.load_pem_public_key(data)
        )
        public = SSlibKey.from_crypto(key.public_key() if private else key)
    except TypeError:
        raise BadValue(
            f"{path} is encrypted: write it out for the signature (openssl pkey -in {path} -out PLAIN)"
        ) from None
    except Exception as error:  # cryptography raises ValueError, UnsupportedAlgorithm and others
        kind = "private" if private else "public"
        cure = "" if private else f" (the public part of a private key: openssl pkey -in {path} -pubout)"
        raise BadValue(
            f"{path} is not a {kind} key in PEM of a kind that signs (Ed25519, ECDSA, RSA): {why(error)[:120]}{cure}"
        ) from None
    return Signer(path, public, key if private else None)


def model_signing_for(signer: Signer) -> Any:
    """The library model-signing. Raises BadValue for a kind of key that it does not take, Refused if it is not installed."""
    if "ecdsa" not in str(signer.public.scheme):
        raise BadValue(f"{signer.path} is {signer.public.scheme}; model signing takes ECDSA keys (a key pair: {MAKE})")
    try:
        import model_signing
    except ImportError as error:  # its release 1.1.1 does not declare pyOpenSSL
        raise Refused(f"a published folder's signature needs the package {error.name}: {install('disclose')}") from None
    return model_signing


def refuse_link(file: Path) -> None:
    """Raises BadValue where a link or a folder stands in the place of a signature."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise BadValue(f"{file} is not a regular file, and is not written through: remove it")


def sign_folder(folder: Path, signer: Signer, name: str) -> None:
    """Writes OpenSSF model signing's bundle `name` of all other files in `folder` into it, whole or not at all."""
    refuse_link(folder / name)
    drop_partials(folder / name)
    library, folder = model_signing_for(signer), folder.resolve()  # it ignores files of absolute paths only
    hashing = library.hashing.Config().set_ignored_paths(paths=[folder / name])
    config = library.signing.Config().set_hashing_config(hashing).use_elliptic_key_signer(private_key=signer.path)
    with TemporaryDirectory() as aside:
        config.sign(folder, Path(aside) / name)
        write_whole(folder / name, text_of(Path(aside) / name, kind="json"))


def check_folder(folder: Path, signer: Signer, name: str) -> list[str]:
    """What is wrong with the folder according to its bundle, as lines; [] if nothing is."""
    if not (folder / name).is_file() or (folder / name).is_symlink():
        told = (
            "the record says that the folder was published with it, so it was removed, or its signing was interrupted"
        )
        return [f"{name} is missing: {told}: sign it again (mpbridge disclose {folder} --sign KEY --publish)"]
    try:
        library = model_signing_for(signer)
        checker = library.verifying.Config().use_elliptic_key_verifier(public_key=signer.path)
        checker.verify(folder.resolve(), folder.resolve() / name)
    except Refused:  # the library is missing
        raise
    except (
        Exception
    ) as error:  # ValueError for a mismatch or another kind of key, and whatever a stranger's bundle leads to
        said = re.sub(r": Expected 'Digest\(.*?\)', Actual 'Digest\(.*?\)'", "", why(error))
        return [f"{name}: {cut(said)}"]
    return []
