"""``@delayed`` on a ``WorkerSettings``: what can be had with arq's own worker and command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

from .client import DelayArqRedis, refuse_cluster
from .settings import DelaySettings
from .worker import HOSTED, make_releaser, stop_releaser

__all__ = ["delayed"]

T = TypeVar("T", bound="type | dict[str, Any]")
_RELEASER: Final = "delayadapters_releaser"


@overload
def delayed(settings: T, /) -> T: ...
@overload
def delayed(settings: None = None, /, *, delay_settings: DelaySettings | None = None) -> Callable[[T], T]: ...
def delayed(settings: Any = None, /, *, delay_settings: DelaySettings | None = None) -> Any:
    """Jobs of these worker settings defer through the delay queue, and the worker runs the release loop.

    ::

        @delayed
        class WorkerSettings:
            functions = [send_email]

    ``ctx["redis"]`` becomes a :class:`DelayArqRedis` before the settings' own ``on_startup`` runs; the loop stops after
    their ``on_shutdown``. It works under arq's command as under ``delayadapters arq``, on a class or a dict (answered
    as a new one), and once, however often it is applied. Subclasses of the class are prepared like it: arq reads a
    class's own attributes only, so their own hooks count, and inherited ones do not, as without us.

    Args:
        settings: the class or dict.
        delay_settings: :class:`DelaySettings`; default: the attribute or key of that name, else jobs wait on arq's own
            Redis.
    """
    if delay_settings is not None and not isinstance(delay_settings, DelaySettings):
        raise TypeError(f"delay_settings must be a DelaySettings, got {delay_settings!r}")
    if settings is None:
        return lambda target: _prepare(target, delay_settings)
    return _prepare(settings, delay_settings)


def _prepare(target: Any, delay_settings: DelaySettings | None) -> Any:
    if isinstance(target, dict):
        own = dict(target)
        own.update(_hooks(own, delay_settings))
        return own
    if not isinstance(target, type):
        raise TypeError(f"@delayed goes on a WorkerSettings class or a dict of settings, got {target!r}")
    _attach(target, delay_settings)
    inherited = target.__dict__.get("__init_subclass__")

    def prepare_subclass(cls: type, /, **kwargs: Any) -> None:
        if inherited is not None:
            inherited.__get__(None, cls)(**kwargs)
        else:
            parent: Any = super(target, cls)
            parent.__init_subclass__(**kwargs)
        _attach(cls, delay_settings)

    type.__setattr__(target, "__init_subclass__", classmethod(prepare_subclass))
    return target


def _attach(cls: type, delay_settings: DelaySettings | None) -> None:
    own = dict(cls.__dict__)
    if delay_settings is None and "delay_settings" not in own:
        delay_settings = getattr(cls, "delay_settings", None)  # ours, so inheriting it is no surprise
    for name, value in _hooks(own, delay_settings).items():
        setattr(cls, name, value)


def _hooks(own: dict[str, Any], delay_settings: DelaySettings | None) -> dict[str, Any]:
    settings: DelaySettings | None = delay_settings or own.get("delay_settings")
    startup, shutdown = own.get("on_startup"), own.get("on_shutdown")
    if getattr(startup, "delayadapters", False):
        return {}

    async def on_startup(ctx: dict[Any, Any]) -> None:
        if not ctx.get(HOSTED):
            redis = DelayArqRedis.of(ctx["redis"], settings)
            await refuse_cluster(redis)
            ctx["redis"] = redis
            if redis.delay_settings.embed:
                ctx[_RELEASER] = make_releaser(redis)
                await ctx[_RELEASER].start()
        if startup is not None:
            await startup(ctx)

    async def on_shutdown(ctx: dict[Any, Any]) -> None:
        try:
            if shutdown is not None:
                await shutdown(ctx)
        finally:
            releaser = ctx.pop(_RELEASER, None)
            if releaser is not None:
                await stop_releaser(releaser)
            if not ctx.get(HOSTED) and isinstance(ctx.get("redis"), DelayArqRedis):
                await ctx["redis"].close_delay()

    on_startup.delayadapters = True  # type: ignore[attr-defined]
    hooks: dict[str, Any] = {"on_startup": on_startup, "on_shutdown": on_shutdown}
    if settings is not None:
        hooks["delay_settings"] = settings
    return hooks
