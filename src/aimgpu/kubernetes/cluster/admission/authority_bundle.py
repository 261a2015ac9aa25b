"""The authorities that the API server trusts: those of the newest certificate, and of what other replicas may still serve."""

import datetime as dt

from cryptography import x509

END = "-----END CERTIFICATE-----\n"
_BEGIN = "-----BEGIN CERTIFICATE-----"
_FORMER = 3  # a switch to another issuer and back while replicas are replaced


def extend_bundle(present: str, authority: str, now: dt.datetime) -> str:
    """`present` where it holds the authority already; else the authority before the latest others that are valid."""
    held, own = _split(present), _split(authority)
    if set(own) <= set(held):
        return present
    others = [each for each in held if each not in own and _is_valid(each, now)]
    return "".join([*own, *others[:_FORMER]])


def _split(bundle: str) -> list[str]:
    """Each certificate as one text that compares equal, whatever stands around it."""
    parts = (part.partition(_BEGIN)[2] for part in bundle.split(END.strip())[:-1])
    return [f"{_BEGIN}\n{part.strip()}\n{END}" for part in parts if part.strip()]


def _is_valid(certificate: str, now: dt.datetime) -> bool:
    try:
        return x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc > now
    except ValueError:
        return False
