"""One certificate authority for a test cluster, and the certificates and kubeconfigs that it signs."""

import base64
import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = dt.timedelta(days=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs what the cluster's components and its webhooks serve and present."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("aimgpu-test-cluster", "")
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        own = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.certificate = folder / "ca.crt"
        self.certificate.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    @property
    def bundle(self) -> str:
        """The authority's certificate in base64, as webhook configurations and kubeconfigs want it."""
        return _base64(self.certificate)

    def issue(self, name: str, user: str, group: str = "", hosts: tuple[str, ...] = ()) -> Certificate:
        """A certificate for a server with these host names or addresses, or for a client that is that user."""
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = self._builder(_name(user, group), key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        made = Certificate(certificate=self._folder / f"{name}.crt", key=self._folder / f"{name}.key")
        signed = builder.sign(self._key, hashes.SHA256())
        made.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        made.key.write_bytes(_private(key))
        return made

    def signing_keys(self, name: str) -> Certificate:
        """A key pair without a certificate: what service account tokens are signed with."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = Certificate(certificate=self._folder / f"{name}.pub", key=self._folder / f"{name}.key")
        made.key.write_bytes(_private(key))
        public = serialization.PublicFormat.SubjectPublicKeyInfo
        made.certificate.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, public))
        return made

    def kubeconfig(self, path: Path, client: Certificate, server: str) -> Path:
        certificate, key = _base64(client.certificate), _base64(client.key)
        path.write_text(
            f"""apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: "{server}", certificate-authority-data: {self.bundle}}}}}]
users: [{{name: test, user: {{client-certificate-data: {certificate}, client-key-data: {key}}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
current-context: test
"""
        )
        path.chmod(0o600)
        return path

    def _builder(self, subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + LIFETIME)
        )


def _name(user: str, group: str) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
