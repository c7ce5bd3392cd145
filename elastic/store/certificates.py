"""Issues the certificates by which a job's processes and its coordinator authenticate each other.

Every process that knows the secret derives the same certificate authority from it, which signs a
certificate for a new key of its own. So members and clients authenticate each other by mutual TLS,
and only the secret has to be distributed.

The name in the certificates is a constant: a certificate shows that its owner knows the secret,
whatever address it has. Only members among each other insist on the name or address by which they
are known, so a member's certificate has that too. Certificates do not expire: to shut out former
clients, replace the secret.
The secret must be random, because the authority's public key is seen on the network and would let
somebody try guesses.

Sources: HKDF-SHA256 of RFC 5869; keys on the curve P-256.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER_NAME = "coordinator.keepstep"
"""The host name in every certificate, which clients verify instead of the host's own."""

_LABEL = b"keepstep coordinator 1: authority"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve P-256 (SEC 2, 2.4.2)."""
_NBYTES = 48
"""Bytes to reduce: 128 bits more than the order has, so that the remainder is nearly uniform (FIPS
186-5)."""
# Clocks of nodes may be wrong.
_BEGIN = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Certificates:
    """The PEM texts with which one process authenticates itself and others.

    Args:
        authority: the certificate that others' certificates are verified against.
        certificate: this process's.
        key: its private key.
    """

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def issue(secret: bytes, names: Sequence[str] = (SERVER_NAME,)) -> Certificates:
    """Return new certificates of the authority that follows from the secret.

    Args:
        secret: of the coordinator.
        names: host names and addresses in this process's certificate.
    """
    authority_key = _authority_key(secret)
    own_key = ec.generate_private_key(ec.SECP256R1())
    return Certificates(
        authority=_pem(_authority(authority_key)),
        certificate=_pem(_issued(authority_key, own_key.public_key(), names)),
        key=own_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    number = int.from_bytes(HKDF(SHA256(), _NBYTES, salt=None, info=_LABEL).derive(secret), "big")
    return ec.derive_private_key(number % (_ORDER - 1) + 1, ec.SECP256R1())


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    public = key.public_key()
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        _begun("keepstep", public)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, SHA256())
    )


def _issued(
    authority_key: ec.EllipticCurvePrivateKey,
    public: ec.EllipticCurvePublicKey,
    names: Sequence[str],
) -> x509.Certificate:
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    begun = (
        _begun(SERVER_NAME, public)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(issuer, critical=False)
    )
    if names:
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in names])
        begun = begun.add_extension(alternatives, critical=False)
    return begun.sign(authority_key, SHA256())


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _begun(name: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name("keepstep"))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
