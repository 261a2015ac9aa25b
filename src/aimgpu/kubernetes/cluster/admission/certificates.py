"""The certificate that the API server knows the webhooks by: made here, kept in a Secret, renewed before it ends."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = dt.timedelta(days=365)
RENEW_BEFORE = dt.timedelta(days=90)
_BACKDATED = dt.timedelta(minutes=10)  # clocks of API servers differ
_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"  # keys of the Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCertificate:
    """PEM texts. The authority's key is forgotten once it has signed: nothing else can be signed by it."""

    authority: str
    certificate: str
    key: str = field(repr=False)

    def is_fresh(self, service: str, namespace: str, now: dt.datetime) -> bool:
        """Whether it is for this service and will not end soon."""
        try:
            found = x509.load_pem_x509_certificate(self.certificate.encode())
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, x509.ExtensionNotFound):
            return False
        wanted = f"{service}.{namespace}.svc"
        return wanted in names.get_values_for_type(x509.DNSName) and found.not_valid_after_utc - now > RENEW_BEFORE

    def to_secret(self) -> Mapping[str, str]:
        return {AUTHORITY: self.authority, CERTIFICATE: self.certificate, KEY: self.key}


def make_certificate(service: str, namespace: str, now: dt.datetime) -> ServingCertificate:
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("aim-gpu-sharing admission authority")
    authority = (
        _builder(issuer, issuer, authority_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS_CERTIFICATES, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    hosts = [f"{service}.{namespace}.svc", f"{service}.{namespace}.svc.cluster.local", f"{service}.{namespace}"]
    certificate = (
        _builder(_name(hosts[0]), issuer, key.public_key(), now)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        # Which of several authorities of this name it is: those of before stay in the bundle.
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return ServingCertificate(authority=_pem(authority), certificate=_pem(certificate), key=text)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, now: dt.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + LIFETIME)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
