"""Claims about authentication: TLS, certificates, users and passwords, on a real etcd."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import psutil
import pytest
import trustme

from keepstep.elastic.errors import StoreUnavailable, UsageError
from keepstep.elastic.store.address import Access, Address, parse_address
from keepstep.elastic.store.contract import Put, Reset
from keepstep.elastic.store.credentials import Credentials, coordinator_secret
from keepstep.elastic.store.embedded import EmbeddedEtcd, binary
from keepstep.elastic.store.etcd import EtcdStore
from keepstep.elastic.store.etcd_messages import auth as auth_messages
from keepstep.elastic.store.etcd_messages import rpc, stub
from keepstep.elastic.store.ports import ReservedPort
from keepstep.private_files import write_file
from tests.adaptive_timeouts import patient
from tests.integration.store.cluster import EtcdCluster

PASSWORD = "between us"
AGENT = Credentials(user="agent", password=PASSWORD)


class EncryptedEtcd:
    """An etcd that uses TLS and requires client certificates, with the files for its clients."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / "ca.pem")
        for name, issued in (
            ("server", authority.issue_cert("127.0.0.1")),
            ("client", authority.issue_cert("agent")),
        ):
            issued.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
            issued.private_key_pem.write_to_path(directory / f"{name}.key")
        self._ports = (ReservedPort(), ReservedPort())
        self.port, peer = (port.number for port in self._ports)
        self._command = [
            sys.executable, "-P", "-m", "keepstep.processes", str(os.getpid()), binary(),
            "--data-dir", str(directory / "data"), "--log-level", "error", "--unsafe-no-fsync",
            "--cert-file", str(directory / "server.pem"),
            "--key-file", str(directory / "server.key"),
            "--client-cert-auth", "--trusted-ca-file", str(directory / "ca.pem"),
            "--listen-client-urls", f"https://127.0.0.1:{self.port}",
            "--advertise-client-urls", f"https://127.0.0.1:{self.port}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-cluster", f"default=http://127.0.0.1:{peer}",
        ]  # fmt: skip

    def start(self) -> None:
        self.process = subprocess.Popen(self._command)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for port in self._ports:
            port.close()

    @property
    def address(self) -> Address:
        return parse_address(f"etcds://127.0.0.1:{self.port}")

    def environment(self, *names: str) -> dict[str, str]:
        files = {"CACERT": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
        return {f"ETCDCTL_{name}": str(self._directory / files[name]) for name in names}


@pytest.fixture
def encrypted_etcd(tmp_path: Path) -> Iterator[EncryptedEtcd]:
    server = EncryptedEtcd(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def plain_etcd() -> Iterator[EtcdCluster]:
    with EtcdCluster(members=1) as server:
        yield server


async def enable_users(endpoint: str) -> None:
    """Turn on access control; add a root user and an agent that may use /t/ and /keepstep/."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        auth = stub("etcdserverpb.Auth", channel)
        await auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
        await auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="root"))
        await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        await auth.RoleAdd(rpc.AuthRoleAddRequest(name="job"))
        for prefix in (b"/t/", b"/keepstep/"):
            allowed = auth_messages.Permission(
                permType=auth_messages.Permission.READWRITE,
                key=prefix,
                range_end=prefix[:-1] + bytes([prefix[-1] + 1]),
            )
            await auth.RoleGrantPermission(
                rpc.AuthRoleGrantPermissionRequest(name="job", perm=allowed)
            )
        await auth.UserAdd(rpc.AuthUserAddRequest(name="agent", password=PASSWORD))
        await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="agent", role="job"))
        await auth.AuthEnable(rpc.AuthEnableRequest())


def test_encrypted_coordinator_accepts_only_clients_with_a_certificate(
    encrypted_etcd: EncryptedEtcd,
) -> None:
    async def scenario() -> None:
        complete = Credentials.of(encrypted_etcd.environment("CACERT", "CERT", "KEY"))
        address = encrypted_etcd.address
        store = await EtcdStore.connect(address, deadline_s=30.0, credentials=complete)
        await store.commit((), (Put("/t/a", b"1"),))
        assert (await store.read("/t/")).items[0].value == b"1"
        await store.close()
        without_certificate = Credentials.of(encrypted_etcd.environment("CACERT"))
        for credentials in (without_certificate, Credentials()):
            with pytest.raises(StoreUnavailable):
                await EtcdStore.connect(address, deadline_s=0.5, credentials=credentials)

    asyncio.run(scenario())


SECRET = b"known to all nodes of the job"


def test_etcd_of_a_job_serves_only_clients_that_know_its_secret(tmp_path: Path) -> None:
    async def scenario(address: Address) -> None:
        store = await EtcdStore.connect(address, credentials=Credentials.from_secret(SECRET))
        await store.commit((), (Put("/t/a", b"1"),))
        assert (await store.read("/t/")).items[0].value == b"1"
        await store.close()
        for credentials in (
            Credentials.from_secret(SECRET + b"!"),
            replace(Credentials.from_secret(SECRET), certificate=None, key=None),
        ):
            with pytest.raises(StoreUnavailable, match="--secret-file"):
                await EtcdStore.connect(address, deadline_s=0.5, credentials=credentials)
        with pytest.raises(StoreUnavailable):
            await EtcdStore.connect(replace(address, access=Access.PLAIN), deadline_s=0.5)

    with EmbeddedEtcd(SECRET, parent=tmp_path) as server:
        asyncio.run(scenario(parse_address(server.url)))


def test_client_does_not_talk_to_an_etcd_that_does_not_know_the_secret(tmp_path: Path) -> None:
    async def scenario(address: Address) -> None:
        with pytest.raises(StoreUnavailable):
            await EtcdStore.connect(
                address, deadline_s=0.5, credentials=Credentials.from_secret(SECRET)
            )

    with EmbeddedEtcd(b"another job's secret", parent=tmp_path) as server:
        asyncio.run(scenario(parse_address(server.url)))
    with EtcdCluster(members=1) as plain:
        asyncio.run(scenario(Address(tuple(plain.clients), Access.SECRET)))


def test_no_port_of_a_jobs_etcd_answers_a_browser_or_another_user(tmp_path: Path) -> None:
    """Neither the clients' port nor the members', in clear or by TLS without a certificate."""
    with EmbeddedEtcd(SECRET, parent=tmp_path) as server:
        ports = {
            connection.laddr.port
            for connection in psutil.Process(server.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert len(ports) == 2
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        for port in ports:
            for context in (None, unverified):
                for path in ("/version", "/health", "/members", "/v3/kv/range", "/metrics"):
                    request = f"GET {path} HTTP/1.0\r\nOrigin: http://evil.example\r\n\r\n"
                    answer = ask(port, request.encode(), context)
                    assert not answer.startswith((b"HTTP/1.0 2", b"HTTP/1.1 2")), answer
                    assert b"Access-Control-Allow-Origin" not in answer


def test_browser_with_the_users_certificate_may_not_ask_for_another_site(tmp_path: Path) -> None:
    with EmbeddedEtcd(SECRET, parent=tmp_path) as server:
        port = int(server.url.rpartition(":")[2])
        # The certificate verifies a name, not the address; `ask` does not care.
        context = server._client_context()
        context.check_hostname = False
        for path, is_served in (("/version", True), ("/v3/kv/range", False)):
            request = f"GET {path} HTTP/1.0\r\nOrigin: http://evil.example\r\n\r\n"
            answer = ask(port, request.encode(), context)
            assert (b" 200 OK" in answer) == is_served
            assert b"Access-Control-Allow-Origin: http://evil" not in answer
            assert b"Access-Control-Allow-Origin: *" not in answer


def ask(port: int, request: bytes, context: ssl.SSLContext | None) -> bytes:
    """Return what a server answers; nothing if it ends the connection."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=patient(10)) as plain:
            connection = plain if context is None else context.wrap_socket(plain)
            connection.sendall(request)
            return connection.recv(4096)
    except (ssl.SSLError, ConnectionError):
        return b""


def test_files_of_a_jobs_etcd_are_private_and_removed_with_it(tmp_path: Path) -> None:
    with EmbeddedEtcd(SECRET, parent=tmp_path):
        (directory,) = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o077 == 0
        assert (directory / "member.key").stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("endpoint", ["192.0.2.1:2379", "127.0.0.1:1,192.0.2.1:1"])
def test_coordinator_on_the_network_without_a_secret_is_refused(
    endpoint: str, tmp_path: Path
) -> None:
    address = parse_address(f"keepstep://{endpoint}")
    with pytest.raises(UsageError, match=r"192.0.2.1 .*openssl rand .*--secret-file"):
        coordinator_secret(address, {})
    path = tmp_path / "secret"
    write_file(path, SECRET + b"\n")
    assert coordinator_secret(replace(address, secret_file=path), {}) == SECRET
    assert coordinator_secret(address, {"KEEPSTEP_SECRET_FILE": str(path)}) == SECRET


def test_coordinator_on_loopback_has_a_secret_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    secret = coordinator_secret(parse_address("keepstep://localhost:1"), {})
    assert coordinator_secret(parse_address("keepstep://127.0.0.1:2"), {}) == secret
    (tmp_path / "keepstep").chmod(0o777)
    with pytest.raises(UsageError, match="chmod 700"):
        coordinator_secret(parse_address("keepstep://127.0.0.1:2"), {})


def test_password_is_not_sent_over_a_network_without_tls() -> None:
    environment = {"ETCDCTL_USER": "agent", "ETCDCTL_PASSWORD": PASSWORD}
    with pytest.raises(UsageError, match=r"sent to 192\.0\.2\.1 .*etcds://"):
        Credentials.for_address(parse_address("etcd://127.0.0.1:1,192.0.2.1:1"), environment)
    for url in ("etcd://127.0.0.1:1,localhost:1", "etcds://192.0.2.1:1"):
        assert Credentials.for_address(parse_address(url), environment) == AGENT
    assert Credentials.for_address(parse_address("etcd://192.0.2.1:1"), {}) == Credentials()


def test_client_authenticates_again_when_its_token_is_no_longer_valid(
    plain_etcd: EtcdCluster,
) -> None:
    address = parse_address(plain_etcd.url)

    async def scenario() -> None:
        await enable_users(address.endpoints[0])
        with pytest.raises(UsageError, match="ETCDCTL_USER"):
            await EtcdStore.connect(address, credentials=Credentials())
        with pytest.raises(UsageError, match="rejected user agent"):
            await EtcdStore.connect(
                address, credentials=Credentials(user="agent", password="wrong")
            )
        store = await EtcdStore.connect(address, credentials=AGENT)
        revision = (await store.read("/t/")).revision
        lease = await store.grant(30.0)
        await store.commit((), (Put("/t/a", b"1", lease),))
        assert await store.renew(lease) > 0
        changes = store.watch("/t/", revision)
        first = await anext(changes)
        assert not isinstance(first, Reset)
        assert first[0].key == "/t/a"
        # A change of users makes all earlier tokens invalid.
        root = Credentials(user="root", password="root")
        other = await EtcdStore.connect(address, credentials=root)
        lease = await store.grant(60)
        assert await store.renew(lease) > 0
        await change_users(address.endpoints[0])
        assert await store.renew(lease) > 0
        async with asyncio.timeout(patient(30)):
            repeated = await anext(store.watch("/t/", revision))
        assert not isinstance(repeated, Reset)
        assert repeated[0].key == "/t/a"
        await store.commit((), (Put("/t/b", b"2"),))
        assert {item.key for item in (await store.read("/t/")).items} == {"/t/a", "/t/b"}
        with pytest.raises(UsageError, match="permission denied"):
            await store.read("/somebody-elses/")
        with pytest.raises(UsageError, match="refuses a watch on /somebody-elses/"):
            await anext(store.watch("/somebody-elses/", 0))
        await store.close()
        await other.close()

    asyncio.run(scenario())


def test_client_switches_from_a_member_that_requires_a_token_but_grants_none(
    plain_etcd: EtcdCluster,
) -> None:
    """A member without a leader behaves so: it rejects tokens, and cannot create any."""
    methods: list[str] = []

    class Leaderless(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            async def answer(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
                methods.append(details.method.rpartition("/")[2])
                if methods[-1] == "Authenticate":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
                await context.abort(
                    grpc.StatusCode.UNAUTHENTICATED, "etcdserver: invalid auth token"
                )
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    async def scenario() -> None:
        (endpoint,) = plain_etcd.clients
        await enable_users(endpoint)
        member = grpc.aio.server(handlers=[Leaderless()])
        port = member.add_insecure_port("127.0.0.1:0")
        await member.start()
        try:
            address = parse_address(f"etcd://127.0.0.1:{port},{endpoint}")
            store = await EtcdStore.connect(address, credentials=AGENT)
            await store.commit((), (Put("/t/a", b"1"),))
            assert (await store.read("/t/")).items[0].value == b"1"
            assert methods == ["Range", "Authenticate"]
            await store.close()
        finally:
            await member.stop(0)

    asyncio.run(scenario())


async def change_users(endpoint: str) -> None:
    """Add a user, which makes all tokens invalid."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        auth = stub("etcdserverpb.Auth", channel)
        token = (
            await auth.Authenticate(rpc.AuthenticateRequest(name="root", password="root"))
        ).token
        await auth.UserAdd(
            rpc.AuthUserAddRequest(name="new", password="new"),
            metadata=(("token", token),),
        )


def test_credentials_come_from_the_variables_of_etcdctl_and_repr_hides_secrets(
    tmp_path: Path,
) -> None:
    credentials = Credentials.of({"ETCDCTL_USER": f"agent:{PASSWORD}"})
    assert credentials == AGENT
    assert PASSWORD not in repr(credentials)
    assert Credentials.of({"ETCDCTL_USER": "agent", "ETCDCTL_PASSWORD": PASSWORD}) == AGENT
    assert Credentials.of({}) == Credentials()
    with pytest.raises(UsageError, match=r"ETCDCTL_CACERT=.*no\.pem: No such file"):
        Credentials.of({"ETCDCTL_CACERT": str(tmp_path / "no.pem")})
    (tmp_path / "cert.pem").write_text("")
    with pytest.raises(UsageError, match="only one of ETCDCTL_CERT and ETCDCTL_KEY"):
        Credentials.of({"ETCDCTL_CERT": str(tmp_path / "cert.pem")})


def test_address_keeps_the_scheme_and_converts_back_to_its_url() -> None:
    for url in ("etcd://h:1,g:2", "etcds://h:1", "keepstep://h:1"):
        assert parse_address(url).url == url
