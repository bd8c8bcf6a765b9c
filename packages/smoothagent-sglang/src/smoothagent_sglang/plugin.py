"""Puts the lookahead scheduler into SGLang's, by its own doors.

From 0.5.11 on SGLang loads `register` in every process (entry points ``sglang.srt.plugins``); 0.5.9 and 0.5.10 are
started with `run_scheduler_process`. Nothing of SGLang's is copied: its methods are called as they are, with ours
around them.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smoothagent_sglang import asked, attention, engine
from smoothagent_sglang.asked import Asked
from smoothagent_sglang.best_effort import BestEffort
from smoothagent_sglang.errors import SettingError
from smoothagent_sglang.learning import Learner
from smoothagent_sglang.profiles import read_profile
from smoothagent_sglang.settings import FILE, Settings, read_settings

log = logging.getLogger("smoothagent.sglang")

_WORK = "_smoothagent_best_effort"
_ARRIVAL = "_smoothagent_arrival"


def register() -> None:
    """SGLang's entry point: applies the scheduler to this process."""
    refused = engine.refused_version(version("sglang"))
    settings = _settings()
    if refused is not None:
        if settings.strict:
            raise SettingError(refused)
        log.error("lookahead requests run as any other: %s", refused)
        return
    apply(settings)


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """SGLang's function of that name with the scheduler applied, for versions that load no plug-ins."""
    register()
    return engine.module("managers.scheduler").run_scheduler_process(*args, **kwargs)


def _settings() -> Settings:
    path = os.environ.get(FILE)
    return read_settings(Path(path)) if path else Settings()


def apply(settings: Settings) -> None:
    """Wrap the scheduler's methods; once in a process."""
    scheduler = engine.module("managers.scheduler").Scheduler
    schedule_policy = engine.module("managers.schedule_policy")
    if hasattr(scheduler, _WORK):
        return
    setattr(scheduler, _WORK, None)
    _around(scheduler, "__init__", functools.partial(_begin, settings))
    _around(scheduler, "_add_request_to_queue", _intake)
    _around(scheduler, "get_new_batch_prefill", _step)
    _around(scheduler, "run_batch", _run)
    _around(scheduler, "abort_request", _abort)
    _around(scheduler, "flush_cache", _flush)
    _around(scheduler, "get_internal_state", _tell)
    _around(scheduler, "set_internal_state", _promote)
    _around(scheduler, "is_fully_idle" if hasattr(scheduler, "is_fully_idle") else "_is_no_request", _idle)
    results = schedule_policy.AddReqResult
    _around(schedule_policy.SchedulePolicy, "calc_priority", _order)
    _around(schedule_policy.PrefillAdder, "add_one_req", functools.partial(_admit, results))
    log.info("lookahead requests are best-effort work in process %d", os.getpid())


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have ``wrapper(original, self, …)`` called in the place of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


# ---- the scheduler's methods -------------------------------------------------------------------


def _begin(settings: Settings, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if str(self.server_args.attention_backend) == "torch_native":
        attention.apply()
    if not settings.enabled:
        return
    refused = engine.refused_server(self)
    if refused is not None:
        if settings.strict:
            raise SettingError(f"lookahead requests cannot be scheduled on this server: {refused}")
        log.error("lookahead requests run as any other on this server: %s", refused)
        return
    profile = None if settings.profile is None else read_profile(settings.profile)
    if profile is not None:
        served = self.server_args
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        profile.require(model=str(served.model_path), dtype=dtype, tensor_parallel=int(served.tp_size))
    work = BestEffort(self, settings, Learner(None if profile is None else profile.latency))
    setattr(self, _WORK, work)
    # The adder and the policy know no scheduler.
    self.policy._smoothagent_best_effort = work
    self.tree_cache._smoothagent_best_effort = work


def _intake(original: Any, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    work: BestEffort | None = getattr(self, _WORK)
    if not hasattr(req, _ARRIVAL):
        setattr(req, _ARRIVAL, time.monotonic())
    retracted = bool(args and args[0]) or bool(kwargs.get("is_retracted"))
    if work is None or retracted or req.finished() or getattr(req, "to_finish", None) is not None:
        return original(self, req, *args, **kwargs)
    wanted = asked.asked(getattr(req.sampling_params, "custom_params", None))
    if isinstance(wanted, str):
        work.counts["invalid"] += 1
        req.set_finish_with_abort(wanted)
        return original(self, req, *args, **kwargs)
    before = len(self.waiting_queue)
    result = original(self, req, *args, **kwargs)
    if isinstance(wanted, Asked):
        why = engine.ordinary(req)
        if why is not None:
            work.counts["ordinary"] += 1
            log.warning("a lookahead request runs as any other: %s", why)
        elif len(self.waiting_queue) > before and self.waiting_queue[-1] is req:
            # SGLang has checked it as any other request; it waits here instead.
            self.waiting_queue.pop()
            work.take(req, wanted)
    return result


def _step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    work: BestEffort | None = getattr(self, _WORK)
    if work is None:
        return original(self, *args, **kwargs)
    running = kwargs.get("running_batch") or (args[0] if args else self.running_batch)
    try:
        self.waiting_queue.extend(work.offer(running))
    except Exception as error:
        _fail(work, error)
    try:
        return original(self, *args, **kwargs)
    finally:
        work.settle()


def _run(original: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    work: BestEffort | None = getattr(self, _WORK)
    if work is None:
        return original(self, batch, *args, **kwargs)
    try:
        load = engine.batch_load(batch)
    except Exception as error:
        _fail(work, error)
        return original(self, batch, *args, **kwargs)
    began = time.perf_counter()
    result = original(self, batch, *args, **kwargs)
    try:
        work.ran(batch, load, time.perf_counter() - began)
    except Exception as error:
        _fail(work, error)
    return result


def _abort(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    work: BestEffort | None = getattr(self, _WORK)
    if work is not None:
        try:
            work.abort(request.rid, everything=bool(request.abort_all))
        except Exception as error:
            _fail(work, error)
    return original(self, request, *args, **kwargs)


def _flush(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    work: BestEffort | None = getattr(self, _WORK)
    if work is None:
        return original(self, *args, **kwargs)
    if not len(work):
        work.flushing()
    done = original(self, *args, **kwargs)
    if done:
        work.flushed()
    return done


def _idle(original: Any, self: Any, *args: Any, **kwargs: Any) -> bool:
    work: BestEffort | None = getattr(self, _WORK)
    return bool(original(self, *args, **kwargs)) and not (work is not None and len(work))


def _tell(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    answer = original(self, *args, **kwargs)
    work: BestEffort | None = getattr(self, _WORK)
    if work is not None:
        # In a copy: older versions hand out the server's own arguments.
        answer.internal_state = {**answer.internal_state, asked.LOOKAHEAD: work.state()}
    return answer


def _promote(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    work: BestEffort | None = getattr(self, _WORK)
    told = dict(request.server_args)
    if work is None or asked.PROMOTE not in told:
        return original(self, request, *args, **kwargs)
    # One that is running already, or has ended, needs none; what is no number is nobody's.
    work.promote(told[asked.PROMOTE])
    return engine.updated(engine.module("managers.io_struct").SetInternalStateReqOutput)


# ---- the policy's and the adder's --------------------------------------------------------------


def _order(original: Any, self: Any, waiting: list[Any], *args: Any, **kwargs: Any) -> Any:
    work: BestEffort | None = getattr(self, _WORK, None)
    if work is None:
        return original(self, waiting, *args, **kwargs)
    # They are kept from it: of two that begin alike SGLang lets one wait for the other's cache.
    offered = [req for req in waiting if work.is_offered(req)]
    waiting[:] = [req for req in waiting if not work.is_offered(req)]
    result = original(self, waiting, *args, **kwargs)
    waiting.extend(offered)
    return result


def _admit(results: Any, original: Any, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    work: BestEffort | None = getattr(self.tree_cache, _WORK, None)
    if work is None:
        return original(self, req, *args, **kwargs)
    try:
        if work.is_offered(req):
            return work.admit(self, lambda chosen: original(self, chosen, *args, **kwargs), req, results)
        work.committed(req)
    except Exception as error:
        _fail(work, error)
        return results.OTHER  # the next step goes on without
    return original(self, req, *args, **kwargs)


def _fail(work: BestEffort, error: Exception) -> None:
    """A fault of ours is no reason for the server to end: it goes on as it would without."""
    text = "the lookahead scheduler failed: lookahead requests run as any other from now on"
    log.error(text, exc_info=error)
    scheduler = work.surrender()
    for owner in (scheduler, scheduler.policy, scheduler.tree_cache):
        setattr(owner, _WORK, None)
