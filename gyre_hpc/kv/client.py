"""The client of a page port: the gateway exports and imports through it, ports lend to each other."""

from __future__ import annotations

from typing import TypeVar

import aiohttp
import msgspec

from gyre_hpc.engines.wire import EncodedIds
from gyre_hpc.errors import GyreError
from gyre_hpc.kv.offers import Import, Imported, Lend, Loan, Offer, Return

CONNECT_TIMEOUT_S = 5.0
_Answer = TypeVar("_Answer")


class PortFailed(GyreError):
    """A page port did not answer, or refused (names its address and the reason)."""


class PortClient:
    """One port at `address`."""

    def __init__(
        self, address: str, session: aiohttp.ClientSession, token: str, timeout_s: float = 60.0
    ) -> None:
        self._address, self._session = address, session
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._timeout_s = timeout_s

    async def export(self, ids: EncodedIds, kv_key: str) -> Offer:
        """Have the cell keep the full pages of `ids`; which it has. Raises PortFailed."""
        body = b'{"kv_key":%b,"input_ids":[%b]}' % (msgspec.json.encode(kv_key), ids.text)
        return await self._post("/kv/export", body, Offer)

    async def bring(self, offer: Offer, deadline_s: float) -> Imported:
        """Have the cell pull what it lacks of an offer. Raises PortFailed."""
        return await self._post("/kv/import", msgspec.json.encode(Import(offer, deadline_s)), Imported)

    async def lend(self, pages: Offer) -> Loan:
        """A region with these pages. Raises PortFailed."""
        return await self._post("/kv/lend", msgspec.json.encode(Lend(pages)), Loan)

    async def give_back(self, name: str) -> None:
        """The region of this name may be dropped. Raises PortFailed."""
        await self._post("/kv/return", msgspec.json.encode(Return(name)), type(None))

    async def _post(self, path: str, body: bytes, kind: type[_Answer]) -> _Answer:
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        url = self._address + path
        try:
            async with self._session.post(url, data=body, headers=self._headers, timeout=timeout) as response:
                data = await response.read()
                if response.status != 200:
                    raise PortFailed(
                        f"{url} refused ({response.status}): {data[:500].decode('utf-8', 'replace')}"
                    )
                return msgspec.json.decode(data, type=kind)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise PortFailed(f"{url}: {type(error).__name__}: {error}") from error
