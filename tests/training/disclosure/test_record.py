"""A signed record of a checkpoint: what verifies, by whose judgement, and every kind of tampering refused by name."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import socket

import pytest

from mpbridge.cli.main import main
from mpbridge.training.checkpoint import store
from mpbridge.training.disclosure import record
from tests.training.survival import LLAMA, go, run

pytest.importorskip("securesystemslib", reason="needs the extra disclose")
pytest.importorskip("model_signing", reason="needs the extra disclose")

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

RECORD, SIGNATURE = "precision.intoto.jsonl", "model.sig"
SHARD = "__0_0.distcp"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with checkpoints of steps 2 and 4, both signed and published with the same key; 'key' and 'other' are pairs."""
    place = tmp_path_factory.mktemp("signed")
    folder = place / "run"
    kept = {"save": str(folder / "checkpoints"), "save_interval": 2}
    go(run(iters=4, logger={"log_dir": str(folder)}, checkpoint=kept, model=LLAMA))
    pairs = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("key", "other")}
    pairs["ed"] = ed25519.Ed25519PrivateKey.generate()
    for name, key in pairs.items():
        write_key(place / f"{name}.pem", key)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (place / f"{name}.pub").write_bytes(public)
    shutil.copytree(folder, place / "unsigned")
    for step in (2, 4):
        signed_one = str(folder / "checkpoints" / store.name_of(step))
        assert main(["disclose", signed_one, "--sign", str(place / "key.pem"), "--publish"]) == 0
    return place


def write_key(path, key, password=None):
    how = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))


def checkpoint(made, step=4, run="run"):
    return made / run / "checkpoints" / store.name_of(step)


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the signed checkpoint of step 4."""
    return shutil.copytree(checkpoint(made), tmp_path / store.name_of(4))


def verify(folder, made, capsys, key="key"):
    """(exit code, what is said)."""
    capsys.readouterr()
    code = main(["verify", str(folder), "--key", str(made / f"{key}.pub")])
    said = capsys.readouterr()
    return code, said.out + said.err


def lines(folder):
    return [json.loads(line) for line in (folder / RECORD).read_text().splitlines()]


def write(folder, envelopes):
    (folder / RECORD).write_text("".join(f"{json.dumps(one)}\n" for one in envelopes))


def payload(envelope):
    return json.loads(base64.b64decode(envelope["payload"]))


def signed(made, statement, key="key"):
    """The statement in an envelope signed by the library alone."""
    private = serialization.load_pem_private_key((made / f"{key}.pem").read_bytes(), None)
    signer = CryptoSigner(private)
    envelope = Envelope(json.dumps(statement).encode(), "application/vnd.in-toto+json", {})
    envelope.sign(signer)
    return envelope.to_dict()


@pytest.mark.parametrize("at", ["write_whole", "sign_folder"])
def test_a_signing_that_is_killed_leaves_a_missing_signature_and_none_that_does_not_fit(
    at, made, copy, capsys, monkeypatch
):
    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    again = ["disclose", str(copy), "--run", str(made / "run"), "--sign", str(made / "key.pem"), "--publish"]
    with monkeypatch.context() as patch:
        patch.setattr(record, at, kill)
        with pytest.raises(Killed):
            main(again)
    code, said = verify(copy, made, capsys)
    assert code == 1
    assert f"{SIGNATURE} is missing" in said
    assert "its signing was interrupted" in said
    assert "mismatch" not in said.lower()
    assert main(again) == 0
    assert verify(copy, made, capsys)[0] == 0


@pytest.mark.parametrize("name", [RECORD, SIGNATURE])
def test_half_a_file_of_a_signing_that_was_killed_is_gone_when_it_is_signed_again(name, made, copy, capsys):
    """SIGKILL between the file under its temporary name and the rename."""
    half = copy / f".{name}-0123abcd"
    half.write_text("{")
    code, said = verify(copy, made, capsys)
    assert code == 1
    assert f"{half.name} was added" in said
    again = ["disclose", str(copy), "--run", str(made / "run"), "--sign", str(made / "key.pem"), "--publish"]
    assert main(again) == 0
    assert not half.exists()
    assert verify(copy, made, capsys)[0] == 0


def test_an_untouched_checkpoint_verifies_without_network(made, copy, unsigned, capsys, monkeypatch):
    def network(*_):
        raise AssertionError("network used")

    monkeypatch.setattr(socket.socket, "connect", network)
    code, said = verify(copy, made, capsys)
    assert code == 0, said
    assert "recipe bf16_mixed, engine mcore, native" in said
    assert "PASSED: 3 audits passed, 0 failed" in said
    monkeypatch.chdir(unsigned.parent)  # relative paths too
    for key, more in (("ed", []), ("key", ["--publish"])):
        assert main(["disclose", unsigned.name, "--sign", str(made / f"{key}.pem"), *more]) == 0
        code, said = verify(unsigned.name, made, capsys, key)
        assert code == 0, said


def test_the_envelopes_are_what_others_read(made, copy):
    """DSSE 1.0's encoding written by hand and cryptography's own check; in-toto's library for the statement; SHA-256 by hashlib."""
    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as Form

    public = serialization.load_pem_public_key((made / "key.pub").read_bytes())
    for envelope in lines(copy):
        body, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"]
        encoded = f"DSSEv1 {len(kind)} {kind} {len(body)} ".encode() + body
        public.verify(base64.b64decode(envelope["signatures"][0]["sig"]), encoded, ec.ECDSA(hashes.SHA256()))
        statement = json.loads(body)
        form = {"type" if name == "_type" else name: value for name, value in statement.items()}
        Statement.copy_from_pb(ParseDict(form, Form())).validate()
        files = [file for file in copy.iterdir() if file.name not in (RECORD, SIGNATURE)]
        wanted = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        assert {one["name"]: one["digest"]["sha256"] for one in statement["subject"]} == wanted
    assert payload(lines(copy)[0])["predicate"]["buildDefinition"]["externalParameters"]["recipe"] == "bf16_mixed"
    assert len(payload(lines(copy)[1])["predicate"]["passedTests"]) == 3


def flip(folder):
    data = bytearray((folder / SHARD).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / SHARD).write_bytes(data)


def replace(name, old, new):
    def change(folder, made):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def reword(number, old, new):
    """Another text inside a statement, under the old signature."""

    def change(folder, made):
        envelopes = lines(folder)
        body = base64.b64decode(envelopes[number]["payload"])
        assert old.encode() in body
        envelopes[number]["payload"] = base64.b64encode(body.replace(old.encode(), new.encode())).decode()
        write(folder, envelopes)

    return change


def envelopes(change):
    """Other lines of the record, made from its own."""

    def changes(folder, made):
        found = lines(folder)
        write(folder, change(found, made) or found)

    return changes


def resigned(number, change, key="key"):
    """A statement changed and signed again."""

    def changes(folder, made):
        found = lines(folder)
        statement = payload(found[number])
        change(statement["predicate"])
        found[number] = signed(made, statement, key)
        write(folder, found)

    return changes


def linked(folder, made):
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")


def marked(folder, made):
    """The manifest says suspect, and both statements are about that manifest, signed by the key."""
    store.mark(folder, "suspect")
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    found = []
    for envelope in lines(folder):
        statement = payload(envelope)
        for one in statement["subject"]:
            if one["name"] == "manifest.json":
                one["digest"]["sha256"] = digest
        found.append(signed(made, statement))
    write(folder, found)


def _forged(found, made):
    """A stranger's signature under the owner's key id."""
    stranger = signed(made, payload(found[0]), "other")
    stranger["signatures"][0]["keyid"] = found[0]["signatures"][0]["keyid"]
    return [stranger, found[1]]


def nested(folder, made):
    (folder / "code").mkdir()
    (folder / "code" / "run.py").write_text("print(1)\n")


TAMPERED = {
    "a bit of a shard": (lambda folder, made: flip(folder), f"{SHARD} was changed"),
    "a shard cut short": (lambda folder, made: (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1]), f"{SHARD} was changed"),
    "a file added": (lambda folder, made: (folder / "extra.py").write_text("print(1)\n"), "extra.py was added"),
    "a file whose name is lines": (lambda folder, made: (folder / "x\n  - all is well").write_text(""), "- 'x\\n  - all is well' was added"),
    "a payload that stands twice": (replace(RECORD, '{"payload":', '{"payload": "e30=", "payload":'), "line 1: it is no DSSE envelope"),
    "a file in a folder": (nested, "code/run.py was added"),
    "a file removed": (lambda folder, made: (folder / "common.pt").unlink(), "common.pt is missing"),
    "a shard renamed": (lambda folder, made: (folder / SHARD).rename(folder / "__1_0.distcp"), f"{SHARD} is missing"),
    "a shard behind a link": (linked, "is a symbolic link"),
    "the manifest re-marked": (lambda folder, made: store.mark(folder, "suspect"), "manifest.json was changed"),
    "another step in the manifest": (replace("manifest.json", '"step": 4', '"step": 5'), "manifest.json was changed"),
    "another configuration": (replace("config.yaml", "0.001", "0.002"), "config.yaml was changed"),
    "another fingerprint": (replace("precision.json", "bf16_mixed", "full_bf16"), "precision.json was changed"),
    "another recipe": (reword(0, '"recipe": "bf16_mixed"', '"recipe": "fp32"'), "line 1: its signature does not fit its content"),
    "an audit dropped": (reword(1, '"live audit of step 2 (first update)", ', ""), "line 2: its signature does not fit its content"),
    "another verdict": (reword(1, "PASSED", "FAILED"), "line 2: its signature does not fit its content"),
    "another digest": (reword(0, '"sha256": "', '"sha256": "0'), "line 1: its signature does not fit its content"),
    "the verdict dropped": (envelopes(lambda found, made: found[:1]), "the statement of what the audits found is missing"),
    "the provenance dropped": (envelopes(lambda found, made: found[1:]), "the statement of how it was trained is missing"),
    "one statement twice": (envelopes(lambda found, made: [found[0]] * 2), "a second statement of how it was trained"),
    "the record of another step": (envelopes(lambda found, made: lines(checkpoint(made, 2))), f"{SHARD} was changed"),
    "the verdict of another step": (envelopes(lambda found, made: [found[0], lines(checkpoint(made, 2))[1]]), f"{SHARD} was changed"),
    "a stranger's signature": (envelopes(lambda found, made: [signed(made, payload(one), "other") for one in found]), "not by the key"),
    "a forged key id": (envelopes(_forged), "line 1: its signature does not fit its content"),
    "no signature": (envelopes(lambda found, made: [one | {"signatures": []} for one in found]), "signed by nobody"),
    "another kind of payload": (envelopes(lambda found, made: [one | {"payloadType": "text/plain"} for one in found]), "its payload is 'text/plain'"),
    "a line of another kind": (replace(RECORD, '{"payload":', "[]\n{\"payload\":"), "line 1: it is no DSSE envelope"),
    "an empty record": (envelopes(lambda found, made: [None]), "no DSSE envelope"),
    "the record dropped": (lambda folder, made: (folder / RECORD).unlink(), f"{SIGNATURE}: Signature mismatch: [\"Missing files in model '{store.name_of(4)}': {RECORD}"),
    "the folder's signature dropped": (lambda folder, made: (folder / SIGNATURE).unlink(), f"{SIGNATURE} is missing"),
    "the folder's signature of another step": (lambda folder, made: shutil.copy(checkpoint(made, 2) / SIGNATURE, folder), f"{SIGNATURE}: Signature mismatch"),
    "no signature of either kind": (lambda folder, made: [(folder / name).unlink() for name in (RECORD, SIGNATURE)], "nobody signed it"),
    "another recipe, signed again": (
        resigned(0, lambda body: body["buildDefinition"]["externalParameters"].update(recipe="fp32")), "the record's recipe is fp32, the checkpoint's bf16_mixed",
    ),
    "computed otherwise, signed again": (
        resigned(0, lambda body: body["buildDefinition"]["internalParameters"].update(realization="emulated")), "the record's realization is emulated, the checkpoint's native",
    ),
    "other parallel sizes, signed again": (
        resigned(0, lambda body: body["buildDefinition"]["internalParameters"]["parallel"].update(tensor=8)), "the record's parallel sizes is",
    ),
    "another policy audited, signed again": (resigned(1, lambda body: body["configuration"][0]["digest"].update(sha256="0" * 64)), "audited policy is 000"),
    "a fault dropped, signed again": (marked, "the record says PASSED, the checkpoint is marked suspect"),
    "a fact left out, signed again": (resigned(1, lambda body: body.pop("configuration")), "lacks facts that a record has"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_tampering_is_refused_by_name(made, copy, capsys, name):
    change, expected = TAMPERED[name]
    change(copy, made)
    code, said = verify(copy, made, capsys)
    assert code != 0
    assert expected in said


def test_another_key_does_not_verify(made, copy, capsys):
    code, said = verify(copy, made, capsys, "other")
    assert code == 1
    assert "not by the key" in said


@pytest.fixture
def unsigned(made, tmp_path):
    shutil.copytree(made / "unsigned", tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / store.name_of(4)


def _other_run(folder, made):
    replace("precision.json", '"recipe": "bf16_mixed"', '"recipe": "fp32"')(folder.parent.parent, made)


def _encrypted(folder, made):
    write_key(folder.parent / "key.pem", ec.generate_private_key(ec.SECP256R1()), b"secret")


def _changed(file, change):
    """Another value in a JSON file of the run."""

    def apply(folder, made):
        place = folder.parent.parent / file
        data = json.loads(place.read_text())
        change(data)
        place.write_text(json.dumps(data))

    return apply


def _link(folder, made):
    (folder / SIGNATURE).symlink_to(folder.parent / "elsewhere")


UNSIGNABLE = {
    "a damaged shard": (lambda folder, made: flip(folder), [], f"{SHARD} was changed"),
    "a file added": (lambda folder, made: (folder / "extra").write_text(""), [], "extra was added"),
    "another run": (_other_run, [], "is of another run"),
    "a run of another model": (_changed("precision.json", lambda data: data["config"]["model"].update(num_layers=99)), [], "is of another run than"),
    "a run that was native": (_changed("precision.json", lambda data: data.update(realization="emulated" if data["realization"] == "native" else "native")), [], "realization 'emulated', the checkpoint's 'native'"),
    "a run of another policy": (_changed("precision.json", lambda data: data.update(fingerprint="0" * 64)), [], "policy '0000"),
    "a link in the signature's place": (_link, ["--sign", "{made}/key.pem", "--publish"], "is not a regular file, and is not written through"),
    "no run": (lambda folder, made: (folder.parent.parent / "precision.json").unlink(), [], "name it (--run DIR"),
    "a stranger's contract": (lambda folder, made: (folder / "contract.json").write_text('{"run": {}}'), [], "has no 'recipe'"),
    "a key inside": (lambda folder, made: shutil.copy(made / "key.pem", folder / "key.pem"), ["--sign", "{folder}/key.pem"], "would be published with it"),
    "an encrypted key": (_encrypted, ["--sign", "{folder}/../key.pem"], "is encrypted"),
    "a public key": (lambda folder, made: None, ["--sign", "{made}/key.pub"], "is not a private key"),
    "no key": (lambda folder, made: None, ["--sign", "{made}/none.pem"], "openssl genpkey"),
    "a kind of key that model signing lacks": (lambda folder, made: None, ["--sign", "{made}/ed.pem", "--publish"], "takes ECDSA keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSIGNABLE)
def test_what_cannot_be_signed_is_refused_and_nothing_is_written(made, unsigned, capsys, name):
    change, arguments, expected = UNSIGNABLE[name]
    change(unsigned, made)
    argv = [text.format(folder=unsigned, made=made) for text in arguments or ["--sign", str(made / "key.pem")]]
    assert main(["disclose", str(unsigned), *argv]) != 0
    assert expected in capsys.readouterr().err
    assert not (unsigned / RECORD).exists()


def test_the_verdict_says_what_the_audits_found(made, unsigned, capsys):
    """FAILED for a failed audit or a suspect checkpoint, WARNED for a state that nobody audited; each verifies, and says so."""
    sign = ["disclose", str(unsigned), "--sign", str(made / "key.pem")]
    store.mark(unsigned, "unaudited")
    assert main(sign) == 0
    code, said = verify(unsigned, made, capsys)
    assert (code, "WARNED" in said, "was not audited" in said) == (0, True, True)
    store.mark(unsigned, "suspect")
    assert main(sign) == 1
    code, said = verify(unsigned, made, capsys)
    assert (code, "FAILED" in said, "marked suspect" in said) == (1, True, True)


def test_a_folder_without_a_record_is_signed_and_checked_as_a_whole(made, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert main(["disclose", str(folder), "--sign", str(made / "key.pem")]) == 2
    assert main(["disclose", str(folder), "--sign", str(made / "key.pem"), "--publish"]) == 0
    code, said = verify(folder, made, capsys)
    assert (code, "no record of how it was trained" in said) == (0, True)
    (folder / "config.json").write_text("{ }")
    code, said = verify(folder, made, capsys)
    assert (code, "config.json" in said) == (1, True)


def test_many_files_are_hashed_with_progress(tmp_path):
    from mpbridge.training.disclosure.record import digests

    for number in range(40):
        file = tmp_path / f"part{number % 3}" / f"{number}.bin"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes([number]) * (number << 12))
    told = []
    found = digests(tmp_path, {"part0/3.bin"}, lambda done, total: told.append((done, total)))
    assert found == {
        path.relative_to(tmp_path).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tmp_path.rglob("*.bin"), key=lambda path: path.relative_to(tmp_path).as_posix())
        if path.name != "3.bin"
    }
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] == sum(path.stat().st_size for path in tmp_path.rglob("*.bin")) - (3 << 12)


def test_served_weights_are_signed_with_their_contract(made, tmp_path, capsys, cli):
    """A changed contract, a changed shard and another run's evidence are refused by name."""
    path = checkpoint(made)
    recipe, folder = "bf16_with_mxfp8_mixed", tmp_path / "served"
    command = ["convert", f"ckpt:{path}", f"hf:{folder}", "--quantization", "mxfp8", "--recipe", recipe]
    cli(*command)
    printed = cli("disclose", folder, "--sign", made / "key.pem", code=2)
    assert "served weights with their contract.json, --run DIR" in printed
    sign = ["disclose", str(folder), "--run", str(made / "run"), "--sign", str(made / "key.pem")]
    cli(*sign)
    code, said = verify(folder, made, capsys)
    assert code == 0, said
    assert f"WARNED: 3 audits passed, 0 failed\n  quantized by another recipe than the run's: {recipe}" in said
    names = {one["name"] for one in payload(lines(folder)[0])["subject"]}
    assert names == {"config.json", "contract.json", "model.safetensors"}
    for name in ("contract.json", "model.safetensors"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        code, said = verify(folder, made, capsys)
        assert code == 1
        assert f"  - {name} was changed" in said
        (folder / name).write_bytes(data)
    contract = json.loads((folder / "contract.json").read_text())
    (folder / "contract.json").write_text(json.dumps(contract | {"run": None}))
    assert "names no run" in cli(*sign, code=2)


def test_a_record_that_a_folders_signature_covers_is_not_replaced_alone(made, copy, capsys):
    again = ["disclose", str(copy), "--run", str(made / "run"), "--sign", str(made / "key.pem")]
    flip(copy)  # which hashing would find
    assert main(again) == 2
    flip(copy)
    assert "sign the folder again too (--publish), or remove that file" in capsys.readouterr().err
    assert verify(copy, made, capsys)[0] == 0
    (copy / SIGNATURE).unlink()
    assert main(again) == 0
    assert verify(copy, made, capsys)[0] == 0
