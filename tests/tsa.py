"""A timestamp authority of our own, by the `openssl` command: it signs what it is asked to, with the time it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CONFIG = """
[tsa]
default_tsa = here
[here]
serial = serial
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256, sha512
ess_cert_id_alg = sha256
[authority]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = critical, timeStamping
[root]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
[req]
distinguished_name = name
[name]
"""
EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """``root`` is the certificate to trust; `stamp` answers requests."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs the openssl command")
        folder.mkdir()
        self.folder, self.root = folder, folder / "root.pem"
        (folder / "config").write_text(CONFIG)
        (folder / "serial").write_text("01\n")
        self._openssl("req", "-x509", "-config", "config", "-extensions", "root", *EC, "-keyout", "root.key",
                      "-out", "root.pem", "-subj", "/CN=Root", "-days", "30")  # fmt: skip
        self._openssl("req", "-new", "-config", "config", *EC, "-keyout", "tsa.key", "-out", "tsa.csr",
                      "-subj", "/CN=Authority")  # fmt: skip
        self._openssl("x509", "-req", "-in", "tsa.csr", "-CA", "root.pem", "-CAkey", "root.key", "-CAcreateserial",
                      "-extfile", "config", "-extensions", "authority", "-out", "tsa.pem", "-days", "30")  # fmt: skip

    def stamp(self, request: bytes) -> bytes:
        (self.folder / "q.tsq").write_bytes(request)
        self._openssl("ts", "-reply", "-config", "config", "-queryfile", "q.tsq", "-signer", "tsa.pem",
                      "-inkey", "tsa.key", "-out", "r.tsr")  # fmt: skip
        return (self.folder / "r.tsr").read_bytes()

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self.folder, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
