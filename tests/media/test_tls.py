"""Certificates: the name asked for, the name proved, and what a caller is told when it is not."""

import asyncio
import datetime
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.media.servers import FakeResolver, loopback_policy, response
from triptych.core.config import FetchConfig, MediaConfig, Tier
from triptych.core.errors import SourceUnavailable
from triptych.core.media import MediaRef, Modality
from triptych.http.status import status_of
from triptych.media.fetch import ByteLimit, Fetcher
from triptych.media.plane import MediaPlane
from triptych.media.policy import Policy
from triptych.media.transport import make_tls

NAME = "img.example"
LIMIT = ByteLimit("max_item_bytes", 1_000_000)
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
CA = trustme.CA()
STRANGER = trustme.CA()


class Seen:
    def __init__(self):
        self.port, self.names, self.num_connections, self.num_requests = 0, [], 0, 0


@asynccontextmanager
async def https(certificate, body=b"picture"):
    """An HTTPS server on loopback; notes the names that clients ask for."""
    seen = Seen()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    context.sni_callback = lambda _socket, name, _context: seen.names.append(name)

    async def connected(reader, writer):
        seen.num_connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                seen.num_requests += 1
                writer.write(response(body))
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    listener.get_loop().set_exception_handler(lambda *_: None)  # a client that leaves the handshake is what is tested
    seen.port = listener.sockets[0].getsockname()[1]
    try:
        yield seen
    finally:
        listener.close()


def trusting(*authorities):
    tls = make_tls()
    for authority in authorities:
        authority.configure_trust(tls)
    return tls


async def fetched(seen, host=NAME, tls=None, **config):
    resolver = FakeResolver({host: ["127.0.0.1"]})
    made = Fetcher(
        Policy(loopback_policy(seen.port)), FetchConfig(**config), resolver=resolver, tls=tls or trusting(CA)
    )
    try:
        return [await made.fetch(f"https://{host}:{seen.port}/{i}", LIMIT, max_s=5) for i in range(2)]
    finally:
        await made.close()


async def test_right_certificate_is_asked_for_by_name_and_taken():
    """The connection goes to the checked address; the name goes into the handshake, and the certificate has it."""
    async with https(CA.issue_cert(NAME)) as seen:
        assert await fetched(seen) == [b"picture"] * 2
    assert seen.names == [NAME]  # one handshake for two downloads
    assert seen.num_requests == 2


async def test_certificate_of_an_address_is_taken_for_that_address():
    """A literal host is proved by an address in the certificate."""
    async with https(CA.issue_cert("127.0.0.1")) as seen:
        assert await fetched(seen, "127.0.0.1") == [b"picture"] * 2


@pytest.mark.parametrize(
    ("certificate", "trusted", "reason"),
    [
        (CA.issue_cert("other.example"), CA, "Hostname mismatch"),
        (CA.issue_cert("*.img.example"), CA, "Hostname mismatch"),
        (CA.issue_cert("127.0.0.1"), CA, "Hostname mismatch"),  # the address that is connected to is not the name
        (STRANGER.issue_cert(NAME), CA, "(self-signed certificate in certificate chain|unable to get local issuer)"),
        (CA.issue_cert(NAME, not_before=PAST, not_after=PAST + datetime.timedelta(days=30)), CA, "expired"),
        (CA.issue_cert(NAME, not_before=datetime.datetime(2090, 1, 1, tzinfo=datetime.UTC)), CA, "not yet valid"),
    ],
)
async def test_wrong_certificates_are_refused_by_reason(certificate, trusted, reason):
    """Another name, a stranger's authority, out of date: no request is sent, the reason is told, nothing is retried,
    and the answer is an upstream failure, not ours."""
    async with https(certificate) as seen:
        with pytest.raises(SourceUnavailable, match=reason) as caught:
            await fetched(seen, tls=trusting(trusted))
    assert status_of(caught.value) == 424
    assert caught.value.code == "source_unavailable"
    assert f"https://{NAME}:{seen.port}" in caught.value.message
    assert "127.0.0.1" not in caught.value.message
    assert seen.num_requests == 0
    assert len(seen.names) == 1


async def test_self_signed_certificate_is_refused():
    """A server that vouches for itself, with the right name on it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    built = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    built = built.add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    certificate = trustme.LeafCert(
        key.private_bytes(pem, private, serialization.NoEncryption()),
        built.sign(key, hashes.SHA256()).public_bytes(pem),
        [],
    )
    async with https(certificate) as seen:
        with pytest.raises(SourceUnavailable, match=r"certificate was refused \(self-signed certificate\)"):
            await fetched(seen)
    assert seen.num_requests == 0


async def test_plain_server_behind_https_fails_the_handshake():
    """Something that does not speak TLS."""
    seen = Seen()

    async def plain(reader, writer):
        seen.num_connections += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    listener = await asyncio.start_server(plain, "127.0.0.1", 0)
    seen.port = listener.sockets[0].getsockname()[1]
    try:
        with pytest.raises(SourceUnavailable, match="could not be reached safely: the TLS handshake failed"):
            await fetched(seen)
    finally:
        listener.close()
    assert seen.num_connections == 1


async def test_own_authority_by_configuration(tmp_path):
    """`ca_file` opens a store with an authority of its own, through the whole plane; without it, none."""
    CA.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    ref = MediaRef(Modality.IMAGE, None, param="image_url")
    png = bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
        "0000000d49444154789c6360f8cfc000000301010018dd8db00000000049454e44ae426082"
    )
    async with https(CA.issue_cert(NAME), png) as seen:
        for ca_file, works in ((str(tmp_path / "ca.pem"), True), (None, False)):
            config = MediaConfig(policy=loopback_policy(seen.port), fetch=FetchConfig(ca_file=ca_file))
            async with MediaPlane(config, resolver=FakeResolver({NAME: ["127.0.0.1"]})) as plane:
                refs = [replace(ref, source=f"https://{NAME}:{seen.port}/a.png")]
                if works:
                    assert (await plane.open(refs, tier=Tier(), tenant="t"))[0].data == png
                else:
                    with pytest.raises(SourceUnavailable, match="certificate was refused") as caught:
                        await plane.open(refs, tier=Tier(), tenant="t")
                    assert caught.value.param == "image_url"


def test_keys_are_not_logged_by_the_environment(monkeypatch, tmp_path):
    """SSLKEYLOGFILE of the environment is passed over; old protocols are not spoken; names are checked."""
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    tls = make_tls()
    assert tls.keylog_filename is None
    assert tls.minimum_version == ssl.TLSVersion.TLSv1_2
    assert tls.check_hostname
    assert tls.verify_mode == ssl.CERT_REQUIRED
