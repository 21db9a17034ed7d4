"""The page's HTML, made by the server: works without scripts, but for live charts and actions."""

from pathlib import Path
from time import gmtime, strftime, time
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dora.ops.page.head import head_of
from dora.ops.page.history import History
from dora.ops.page.reading import SHADES, Decode, pieces, turn_bars, worker_bars
from dora.ops.page.track import track_of
from dora.ops.view.numbers import duration, measured
from dora.rpc.dora_pb2 import ShownTrajectory, Status, TrajectoriesReply

FOLDER: Final = Path(__file__).parent / "templates"
LISTED: Final = 100  # trajectories on one page
TOKENS: Final = 2048  # of a trajectory on one page
STATES: Final = ("waiting", "running", "moving", "parked", "idle", "finished", "leased", "committed")
MOVABLE: Final = ("waiting", "running", "moving", "parked", "idle")
TARGETS: Final = 4096  # offered for a move
LANES_SHOWN: Final = 32  # workers of one trajectory, the first

_pages = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
_pages.filters |= {
    "count": lambda value: f"{value:,}",
    "duration": duration,
    "measured": measured,
    "doing": {"sampled": "sampled", "tools": "the environment works", "queue": "waits for a worker"}.get,
    "time": lambda seconds: strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(seconds)),
}


def sign_in(refused: str = "", *, is_clear: bool = False) -> str:
    """Renders the form. If ``is_clear``, the connection is not encrypted and leaves the host."""
    return _page("sign-in.html", refused=refused, is_clear=is_clear, browser=None)


def overview(history: History, trouble: str, browser: Any) -> str:
    status = history.status
    return _page("overview.html", head=head_of(status), model=Path(status.model).name, trouble=trouble, browser=browser)


def trajectories(reply: TrajectoriesReply, *, state: str, worker: str, offset: int, browser: Any) -> str:
    last = offset + len(reply.trajectories)
    return _page(
        "trajectories.html",
        rows=reply.trajectories,
        total=reply.total,
        first=offset + 1 if reply.trajectories else 0,
        last=last,
        before=max(0, offset - LISTED) if offset else None,
        after=last if last < reply.total else None,
        end=max(0, (reply.total - 1) // LISTED * LISTED),
        state=state,
        states=STATES,
        worker=worker,
        browser=browser,
    )


def trajectory(shown: ShownTrajectory, decode: Decode, status: Status, browser: Any) -> str:
    end = shown.first_token + len(shown.is_sampled)
    version = shown.status.version
    targets = [each.worker_id for each in status.workers if each.version == version and each.state == "ready"]
    targets += [pool.pool_id for pool in status.pools if pool.state == "ready"]
    track = track_of(shown, time())
    return _page(
        "trajectory.html",
        track=track,
        lanes_shown=track.lanes[:LANES_SHOWN],
        share=lambda at: round(100 * (at - track.begin) / max(1e-3, track.end - track.begin), 3),
        shown=shown,
        status=shown.status,
        pieces=pieces(shown, decode),
        shades=[*SHADES, None],
        turn_bars=turn_bars(shown),
        worker_bars=worker_bars(shown),
        end=end,
        before=max(0, shown.first_token - TOKENS) if shown.first_token else None,
        after=end if end < shown.total_tokens else None,
        last=max(0, (shown.total_tokens - 1) // TOKENS * TOKENS),
        targets=[name for name in targets if name != shown.status.worker and shown.status.state in MOVABLE][:TARGETS],
        browser=browser,
    )


def refusal(text: str, browser: Any = None) -> str:
    return _page("refusal.html", text=text, browser=browser)


def _page(name: str, **values: Any) -> str:
    return _pages.get_template(name).render(**values)
