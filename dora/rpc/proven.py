"""The client's half of the proofs: a channel that shows nothing to a service, and believes nothing of it, before the
service has proved that it knows the client's token.

A session begins with a challenge. It ends with the connection, as far as gRPC shows, or with an answer without a proof:
whoever has the service's address now may be another. Each call waits for the proof of its answer before it sends a
stream, returns a message, or raises the service's refusal.
"""

import asyncio
import contextlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined] # missing from the type stubs

from dora.errors import MISSING, DoraError, InvalidValue
from dora.rpc import dora_pb2 as pb
from dora.rpc import proof
from dora.rpc.access import name_of, token_for
from dora.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from dora.rpc.errors import NoAnswer, ServiceUnavailable, Unauthenticated, is_broken
from dora.rpc.secure import client_credentials
from dora.rpc.sending import Sending
from dora.system.secret_file import read_token
from dora.tls import Tls

CHALLENGE_S: Final = 30.0  # a connection that answers nothing is given up
PROOF_S: Final = 60.0  # so does a call whose answer does not begin
CROWDED_S: Final = 5.0  # a service that closes connections as they come, because it has too many, is tried for so long
CROWDED_PAUSE_S: Final = 0.1
LOOK_S: Final = 1.0  # between two looks at the files of a certificate, while its connection stands
EARLIER_MAX: Final = 3  # channels with earlier certificates that are kept for their open calls
CROWDED: Final = ("Socket closed", "reset by peer", "Broken pipe")  # in gRPC's words of such a connection
Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class ProvenSession:
    """One session with a proven service. ``key`` is empty if both ends have shown certificates, without a token."""

    holder: str
    client_nonce: bytes
    service_nonce: bytes
    key: bytes
    calls: int = 0

    def credential(self, method: str) -> "CallProof":
        if not self.key:
            return CallProof(self, (), b"")
        self.calls += 1
        mac = proof.call_proof(self.key, method, self.calls)
        header = proof.Credential(self.holder, self.client_nonce, self.service_nonce, self.calls, mac).header()
        return CallProof(self, ((proof.AUTHORIZATION, header),), proof.answer_proof(self.key, method, self.calls))


@dataclass(frozen=True, slots=True)
class CallProof:
    """The metadata of one call, and the proof of its answer, which is empty if the service's certificate is proof."""

    session: ProvenSession
    metadata: Metadata
    answer: bytes

    async def is_proven(self, call: Any) -> bool:
        """Returns whether the call's answer is that of the service. Waits for its beginning.

        If a status comes right behind the initial metadata, grpc.aio may deliver the status first, and no initial
        metadata then. So a status has the proof too.
        """
        begun = await call.initial_metadata()
        if not self.answer:
            return True
        return self._proves(begun) or (call.done() and self._proves(await call.trailing_metadata()))

    def _proves(self, metadata: Any) -> bool:
        for key, value in metadata or ():
            if key == proof.ANSWER_KEY:
                try:
                    return hmac.compare_digest(proof.bytes_of(str(value)), self.answer)
                except ValueError:
                    return False
        return False


class Prover:
    """Knows a token, and whether its service has proved itself before. Lives as long as its client.

    A service that has never proved itself may have another token than ours, which is the user's error. A service that
    stops to prove itself is taken for absent: another may have its address for a time.
    """

    def __init__(self, address: str, token: str | Path, worker_id: str = "", tls: Tls | None = None) -> None:
        """``token`` may be the file that has it, which is read again for each session. It may be empty for a client
        with a certificate. ``worker_id`` is the name of a worker or pool. If ``tls`` is None, it is that of DORA_TLS
        and the like.

        Raises InvalidValue for a token that is not printable ASCII, and for TLS files that cannot be used.
        """
        self._file = token if isinstance(token, Path) else None
        self._token = read_token(token) if isinstance(token, Path) else token
        proof.check_token(self._token)
        self.tls = tls or Tls.from_environment()
        self._credentials = client_credentials(self.tls) if self.tls is not None else None
        self.address = address
        self.worker_id = worker_id
        self._was_proven = False

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """The credentials for a new connection, or None if connections are not encrypted."""
        return self._credentials.current() if self._credentials is not None else None

    async def challenge(self, channel: grpc.aio.Channel, method: str, timeout_s: float | None = None) -> ProvenSession:
        """Begins a session for a call of ``method``.

        Raises grpc.aio.AioRpcError if nobody answers, Unauthenticated without a token or if the service proves another,
        ServiceUnavailable if it did prove ours before.
        """
        self._read_again()
        if not self._token and self.tls is not None and self.tls.cert:
            return ProvenSession("", b"", b"", b"")
        nonce = secrets.token_bytes(proof.NONCE_BYTES)
        metadata: Metadata = ((proof.NONCE_KEY, proof.text_of(nonce)),)
        if self.worker_id:
            metadata += ((proof.WORKER_KEY, quote(self.worker_id, safe="")),)
        ask = channel.unary_unary(proof.CHALLENGE, pb.ChallengeRequest.SerializeToString, pb.ChallengeReply.FromString)
        limit_s = min(timeout_s or CHALLENGE_S, CHALLENGE_S)
        until_s = time.monotonic() + min(limit_s, CROWDED_S)
        while True:
            try:
                reply = await ask(pb.ChallengeRequest(), metadata=metadata, timeout=limit_s)
                break
            except grpc.aio.AioRpcError as error:
                if not is_broken(error.code(), error.details()):
                    raise self.doubted(method, f"answers no challenge ({error.code().name})") from None
                if time.monotonic() >= until_s or not any(each in (error.details() or "") for each in CROWDED):
                    raise
            await asyncio.sleep(CROWDED_PAUSE_S)
        found = self._session(nonce, reply) if self._token else None
        if found is None:
            raise self.doubted(method)
        self._was_proven = True
        return found

    def _read_again(self) -> None:
        if self._file is not None:
            with contextlib.suppress(InvalidValue):  # it is being replaced: the one before may still be valid
                found = read_token(self._file)
                proof.check_token(found)
                self._token = found or self._token

    def doubted(self, method: str, why: str = "") -> DoraError:
        """Returns the error of a call to a service that does not prove that it knows the token. ``why`` is about an
        address whose answers are not those of a service of this release.
        """
        if self._was_proven:
            reason = why or "another service has this address, or ours was restarted with another token"
            return ServiceUnavailable(f"{self.address} does not prove that it knows this client's token: {reason}")
        if why:
            allowed = "the address of a DORA service of this release, which proves that it knows the token"
            return Unauthenticated("address", self.address, allowed, why)
        return Unauthenticated("token", "(wrong)" if self._token else MISSING, token_for(name_of(method)))

    def _session(self, nonce: bytes, reply: pb.ChallengeReply) -> ProvenSession | None:
        """Finds the session of the holder whose proof our token gives. It tries the owner's key, the slowest, last."""
        for each in sorted(reply.proofs, key=lambda each: each.holder == proof.OWNER):
            key = proof.holder_key(each.holder, self._token)
            if hmac.compare_digest(each.proof, proof.service_proof(key, nonce, reply.nonce)):
                return ProvenSession(each.holder, nonce, reply.nonce, proof.session_key(key, nonce, reply.nonce))
        return None


class ProvenChannel(grpc.aio.Channel):
    """A channel for generated stubs. Calls need no metadata, and raise grpc.aio.AioRpcError for a proven service's
    status or an unreachable service; for others as ``Prover.challenge``.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        prover: Prover,
        reopened: Callable[[], grpc.aio.Channel | None] = lambda: None,
    ) -> None:
        """``reopened`` returns another channel if this one's certificate has been replaced since."""
        self._channel = channel
        self._prover = prover
        self._reopened = reopened
        self._earlier: deque[grpc.aio.Channel] = deque()  # on which calls may still be open
        self._looked_s = 0.0
        self._session: ProvenSession | None = None
        self._asking = asyncio.Lock()

    async def begin(
        self, method: str, make: Callable[[Metadata], Any], timeout_s: float | None = None
    ) -> tuple[Any, ProvenSession]:
        """Makes a call once the service has proved itself. Returns it once its answer has begun with a proof; if that
        cannot come, its status is the connection's.

        A service that was restarted has refused the call before it read anything: the call is made a second time.
        """
        for is_again in (False, True):
            sent = await self.credential(method, timeout_s)
            call = make(sent.metadata)
            try:
                async with asyncio.timeout(PROOF_S):
                    if await sent.is_proven(call):
                        return call, sent.session
            except TimeoutError as error:
                call.cancel()
                raise NoAnswer(f"{self._prover.address} did not begin to answer in {PROOF_S:g} s") from error
            except BaseException:
                call.cancel()
                raise
            if self._session is sent.session:
                self._session = None
            if not call.done():
                call.cancel()
            elif is_broken(await call.code(), await call.details()):
                return call, sent.session
            if is_again:
                break
        raise self._prover.doubted(method, "its answer has no proof")

    async def credential(self, method: str, timeout_s: float | None = None) -> "CallProof":
        """Returns what one call sends, of a session with a service that has proved itself over this connection."""
        async with self._asking:
            is_connected = self._channel.get_state() is grpc.ChannelConnectivity.READY
            if not is_connected or time.monotonic() - self._looked_s > LOOK_S:
                self._looked_s = time.monotonic()
                await self._replace()
            if self._session is None or not is_connected:
                self._session = await self._prover.challenge(self._channel, method, timeout_s)
            return self._session.credential(method)

    async def _replace(self) -> None:
        """Makes later calls on another channel if the certificate of this one has been replaced. Open calls stay."""
        if (channel := self._reopened()) is not None:
            self._earlier.append(self._channel)
            self._channel, self._session = channel, None
            if len(self._earlier) > EARLIER_MAX:
                await self._earlier.popleft().close(None)

    def unary_unary(self, method: str, *serializers: Any, _registered_method: bool | None = False, **named: Any) -> Any:
        def make(request: Any, **sent: Any) -> Any:
            return self._channel.unary_unary(method, *serializers, **named)(request, **sent)

        async def call(request: Any, *, timeout: float | None = None) -> Any:  # noqa: ASYNC109 gRPC's own name
            begun, _ = await self.begin(method, lambda sent: make(request, metadata=sent, timeout=timeout), timeout)
            return await begun

        return call

    def unary_stream(
        self, method: str, *serializers: Any, _registered_method: bool | None = False, **named: Any
    ) -> Any:
        def make(request: Any, **sent: Any) -> Any:
            return self._channel.unary_stream(method, *serializers, **named)(request, **sent)

        def call(request: Any, *, timeout: float | None = None) -> ProvenStream:
            return ProvenStream(self.begin(method, lambda sent: make(request, metadata=sent, timeout=timeout), timeout))

        return call

    def stream_unary(
        self, method: str, *serializers: Any, _registered_method: bool | None = False, **named: Any
    ) -> Any:
        def make(messages: Any, **sent: Any) -> Any:
            return self._channel.stream_unary(method, *serializers, **named)(messages, **sent)

        async def call(messages: AsyncIterable[Any], *, timeout: float | None = None) -> Any:  # noqa: ASYNC109
            sending = Sending(messages)
            try:
                begun, _ = await self.begin(
                    method, lambda sent: make(sending.begin(), metadata=sent, timeout=timeout), timeout
                )
                sending.proven.set()
                return await begun
            finally:
                sending.end()

        return call

    def stream_stream(
        self, method: str, *serializers: Any, _registered_method: bool | None = False, **named: Any
    ) -> Any:
        def make(messages: Any, **sent: Any) -> Any:
            return self._channel.stream_stream(method, *serializers, **named)(messages, **sent)

        def call(messages: AsyncIterable[Any], *, timeout: float | None = None) -> ProvenStream:
            sending = Sending(messages)
            beginning = self.begin(method, lambda sent: make(sending.begin(), metadata=sent, timeout=timeout), timeout)
            return ProvenStream(beginning, sending)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)
        while self._earlier:
            await self._earlier.popleft().close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class ProvenStream:
    """The messages of a call, once its service has proved itself. The call is made at once."""

    def __init__(
        self, beginning: Coroutine[Any, Any, tuple[Any, ProvenSession]], sending: Sending | None = None
    ) -> None:
        self._beginning = asyncio.ensure_future(beginning)
        self._beginning.add_done_callback(self._begun)
        self._sending = sending
        self._call: Any = None
        self.session: ProvenSession | None = None  # once the first message has come

    async def read(self) -> Any:
        """Returns the next message, or EOF. Raises as ``ProvenChannel`` says."""
        message = EOF
        try:
            if self._call is None:
                self._call, self.session = await self._beginning
                if self._sending is not None:
                    self._sending.proven.set()
            message = await self._call.read()
        finally:
            if message is EOF:
                self._end_sending()
        return message

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if (message := await self.read()) is EOF:
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        self._end_sending()
        if self._call is not None:
            self._call.cancel()
        elif not self._beginning.cancel() and not self._beginning.cancelled() and not self._beginning.exception():
            self._beginning.result()[0].cancel()

    def _begun(self, beginning: "asyncio.Future[tuple[Any, ProvenSession]]") -> None:
        if beginning.cancelled() or beginning.exception():  # which a reader raises
            self._end_sending()

    def _end_sending(self) -> None:
        if self._sending is not None:
            self._sending.end()


def proven_channel(
    address: str, prover: Prover | str, max_message_bytes: int = MAX_MESSAGE_BYTES, *, proxied: bool = True
) -> ProvenChannel:
    """Returns a channel as ``open_channel`` does, with the prover's TLS. ``prover`` may be a token, for one connection.

    Once the files have another certificate, later calls use a connection with that one; open calls stay on theirs.
    """
    known = Prover(address, prover) if isinstance(prover, str) else prover
    used: grpc.ChannelCredentials | None = None

    def opened() -> grpc.aio.Channel:
        nonlocal used
        used, name = known.credentials, known.tls.name if known.tls is not None else ""
        return open_channel(address, max_message_bytes, proxied=proxied, credentials=used, name=name)

    def reopened() -> grpc.aio.Channel | None:
        return opened() if known.credentials is not used else None

    return ProvenChannel(opened(), known, reopened)
