"""TLS in front of a server that has none: an authority of our own, and a front that ends TLS as PostgreSQL does too."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import struct
import threading
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.loopback import Loopback

SSL_REQUEST = struct.pack(">II", 8, 80877103)
CHUNK = 1 << 16


class Authority:
    """Signs certificates; who trusts it names `bundle`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._begun(self._subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.bundle = directory / f"{name}.pem"
        self.bundle.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _begun(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._subject).public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
        )  # fmt: skip

    def certificate(self, *hosts: str) -> tuple[Path, Path]:
        """A certificate for these hosts, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = []
        for host in hosts:
            is_number = host[0].isdigit()
            names.append(x509.IPAddress(ipaddress.ip_address(host)) if is_number else x509.DNSName(host))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = (
            self._begun(subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        stem = self._directory / f"{self._name}-{hosts[0]}"
        chain, secret = stem.with_suffix(".crt"), stem.with_suffix(".key")
        chain.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        secret.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
        secret.chmod(0o600)
        return chain, secret


class Front(Loopback):
    """Ends TLS on a port of its own and passes the rest on to `target`. `is_postgres`: TLS begins when asked for."""

    def __init__(self, target: int, certificate: tuple[Path, Path], *, is_postgres: bool = False) -> None:
        self._target, self._is_postgres = target, is_postgres
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*certificate)
        self._ends: list[socket.socket] = []
        self.secured = 0
        super().__init__()

    def connected(self, client: socket.socket) -> None:
        with client:
            if self._is_postgres:
                if client.recv(8, socket.MSG_WAITALL) != SSL_REQUEST:
                    return
                client.sendall(b"S")
            with self._context.wrap_socket(client, server_side=True) as secured:
                self.secured += 1
                with socket.create_connection(("127.0.0.1", self._target)) as server:
                    self._ends += [secured, server]
                    back = threading.Thread(target=_pump, args=(server, secured), daemon=True)
                    back.start()
                    _pump(secured, server)
                    back.join()

    def close(self) -> None:
        super().close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
