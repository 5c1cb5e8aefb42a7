"""The certificates of a server, which are read again when their files change: for the connections made from then on."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import grpc
from cryptography import x509

from persist_lib.errors import InvalidUsage
from persist_lib.runtime.reread import Reread


class Certificates:
    """A certificate chain and its private key (PEM), and the authorities that clients' certificates must come from.

    Without `client_ca`, clients need no certificate.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """Raises InvalidUsage if a file cannot be read, or the key is not that of the certificate."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        paths = [cert, key] if client_ca is None else [cert, key, client_ca]
        self.files = Reread(paths, f"the TLS files {', '.join(map(str, paths))}", self._checked)

    def credentials(self) -> grpc.ServerCredentials:
        """What a gRPC server listens with. It asks for the certificates at each connection."""
        return grpc.dynamic_ssl_server_credentials(
            self.files.get(), self.files.get, require_client_authentication=self._client_ca is not None
        )

    def not_after(self) -> float:
        """When the first certificate of the chain in force expires, in seconds since 1970."""
        self.files.get()
        return self._not_after

    def _checked(self, found: Sequence[bytes]) -> grpc.ServerCertificateConfiguration:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Never asks for a passphrase: an encrypted key is an error.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
            if self._client_ca is not None:
                context.load_verify_locations(cadata=found[2].decode())
            chain = x509.load_pem_x509_certificates(found[0])
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise InvalidUsage(
                f"the TLS files {self._cert}, {self._key} and {self._client_ca} are not a certificate, its unencrypted "
                f"private key and authorities of clients, all in PEM: {error}"
            ) from error
        self._not_after = min(one.not_valid_after_utc.timestamp() for one in chain)
        return grpc.ssl_server_certificate_configuration(
            [(found[1], found[0])], root_certificates=found[2] if self._client_ca is not None else None
        )
