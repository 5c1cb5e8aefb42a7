"""Certificates made for a test: an authority, and what it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """An authority whose certificate is in `folder/ca.pem`."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self._signed(self._name, self._key, is_ca=True))

    def issue(self, cert: Path, key: Path, host: str = "127.0.0.1", *, days: int = 1) -> None:
        """Write a certificate for a host, and its key, each by a rename."""
        made = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"of {host}")])
        plain = serialization.NoEncryption()
        private = made.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        for path, data in ((key, private), (cert, self._signed(name, made, host, days=days))):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(data)
            fresh.replace(path)

    def _signed(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, host: str = "", *, is_ca: bool = False, days: int = 1
    ) -> bytes:
        now, day, number = dt.datetime.now(dt.UTC), dt.timedelta(days=1), x509.random_serial_number()
        made = (
            x509.CertificateBuilder(self._name, name, key.public_key(), number, now - day, now + days * day)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )  # fmt: skip
        if host:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
            made = made.add_extension(names, critical=False)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
