"""``@delayed`` on worker settings, and the command: with our worker, and with arq's own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from arq.jobs import JobStatus
from arq.logs import default_log_config
from arq.worker import Worker
from arq.worker import get_kwargs as arq_get_kwargs
from click.testing import CliRunner

from delayadapters.arq import DelayArqRedis, DelaySettings, create_worker, delayed
from delayadapters.arq.worker import get_kwargs
from delayadapters.cli import main
from delaytests import wait_until, wait_until_async

APP = Path(__file__).parent / "app"


async def add(ctx, a, b=1):
    return a + b


# ------------------------------------------------------------ the decorator


def test_it_keeps_the_settings_and_chains_their_hooks():
    called = []

    async def up(ctx):
        called.append("up")

    class Settings:
        functions = [add]
        max_jobs = 7
        on_startup = up

    same = delayed(Settings)
    assert same is Settings
    assert arq_get_kwargs(Settings).keys() == {"functions", "max_jobs", "on_startup", "on_shutdown"}
    assert delayed(Settings).on_startup is Settings.on_startup, "applied twice, it is there once"


def test_a_dict_is_answered_anew():
    given = {"functions": [add], "max_jobs": 3}
    made = delayed(given)
    assert given.keys() == {"functions", "max_jobs"}
    assert made.keys() == {"functions", "max_jobs", "on_startup", "on_shutdown"}


def test_inheritance_is_arqs():
    """arq reads a class's own attributes. So do we, and a subclass of prepared settings is prepared itself."""

    async def base_up(ctx):
        raise AssertionError("arq does not call inherited hooks")

    async def own_up(ctx):
        ctx["own"] = True

    @delayed(delay_settings=DelaySettings(name="base"))
    class Base:
        functions = [add]
        on_startup = base_up

    class Derived(Base):
        functions = [add]

    class Further(Derived):
        functions = [add]
        on_startup = own_up

    for cls in (Derived, Further):
        kwargs = get_kwargs(cls)
        assert kwargs["delay_settings"].name == "base"
        ctx = {"delayadapters": True}
        asyncio.run(kwargs["on_startup"](ctx))
        assert ("own" in ctx) == (cls is Further)


def test_an_init_subclass_of_the_users_own_is_kept():
    seen = []

    @delayed
    class Base:
        def __init_subclass__(cls, label, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append((cls.__name__, label))

    class Derived(Base, label="x"):
        functions = [add]

    assert seen == [("Derived", "x")]
    assert "on_startup" in Derived.__dict__


@pytest.mark.parametrize("target", [5, "jobs.Settings", add])
def test_what_it_cannot_decorate(target):
    with pytest.raises(TypeError, match="WorkerSettings"):
        delayed(target)


def test_bad_settings():
    with pytest.raises(TypeError, match="delay_settings"):
        delayed(delay_settings="redis://localhost")


def test_settings_of_the_class_reach_the_worker():
    @delayed
    class Settings:
        functions = [add]
        delay_settings = DelaySettings(name="mine")
        burst_deferred = False
        handle_signals = False

    async def make():
        return create_worker(Settings, max_jobs=3)

    worker = asyncio.run(make())
    assert (worker.delay_settings.name, worker.burst_deferred, worker.max_jobs) == ("mine", False, 3)


async def end(worker):
    """arq's close() ends with the CancelledError of a job that it interrupts: none may be under way."""
    await wait_until_async(lambda: all(task.done() for task in worker.tasks.values()))
    await worker.close()


async def test_under_arqs_own_worker(settings, pool):
    """The release loop runs, ``ctx["redis"]`` defers through us; waking and retries are left out."""
    seen = []

    async def chain(ctx, left):
        seen.append(type(ctx["redis"]))
        if left:
            await ctx["redis"].enqueue_job("chain", left - 1, _defer_by=0.05)

    async def up(ctx):
        seen.append(type(ctx["redis"]))

    async def down(ctx):
        seen.append("down")

    from arq import func

    made = delayed({"functions": [func(chain, name="chain")], "on_startup": up, "on_shutdown": down})
    worker = Worker(**made, redis_settings=settings, handle_signals=False, poll_delay=0.05)
    task = asyncio.create_task(worker.async_run())
    await pool.enqueue_job("chain", 2, _defer_by=0.1)
    await wait_until_async(lambda: len(seen) == 4)
    assert set(seen) == {DelayArqRedis}
    before = worker.ctx["delayadapters_releaser"]
    await end(worker)
    task.cancel()
    assert seen[-1] == "down"
    assert not before.running


async def test_with_our_worker_there_is_one_release_loop(settings, pool):
    made = delayed({"functions": [add]})
    worker = create_worker(made, redis_settings=settings, handle_signals=False)
    task = asyncio.create_task(worker.async_run())
    await wait_until_async(lambda: worker.releaser is not None)
    assert "delayadapters_releaser" not in worker.ctx
    await end(worker)
    task.cancel()


# ------------------------------------------------------------ the command


async def enqueue(pool, *args, **options):
    return await pool.enqueue_job(*args, **options)


@pytest.mark.parametrize("name", ["Settings", "Plain", "AsDict"])
async def test_the_command_runs_a_class_a_plain_class_or_a_dict(pool, start_worker, ledger, name):
    job = await pool.enqueue_job("record", _defer_by=0.2)
    process = await asyncio.to_thread(start_worker, name)
    await wait_until_async(lambda: job.job_id in ledger.ids(), timeout=90)
    assert await job.result(timeout=40, poll_delay=0.05) == "done"
    # arq's own close() ends with the CancelledError of a job that its end interrupts: none may be under way.
    await wait_until_async(lambda: nothing_runs(pool))
    assert await asyncio.to_thread(process.stop) == 0
    assert ("startup-DelayArqRedis" in ledger.ids()) == (name != "Plain")


async def nothing_runs(pool):
    return not [key async for key in pool.scan_iter("arq:in-progress:*")]


async def test_the_stock_command_on_delayed_settings(pool, start_worker, ledger):
    job = await pool.enqueue_job("chain", 1, _defer_by=0.2)
    process = await asyncio.to_thread(start_worker, "Settings", stock=True)
    await wait_until_async(lambda: {job.job_id, "chain-0"} <= set(ledger.ids()), timeout=90)
    # arq's own close() ends with the CancelledError of a job that its end interrupts: none may be under way.
    await wait_until_async(lambda: nothing_runs(pool))
    assert await asyncio.to_thread(process.stop) == 0
    assert ledger.ids()[-1] == "shutdown"


async def test_burst_and_its_switch(pool, start_worker, ledger):
    later = await pool.enqueue_job("record", _job_id="later", _defer_by=0.5)
    far = await pool.enqueue_job("record", _job_id="far", _defer_by=600)
    now = await pool.enqueue_job("record", _job_id="now")
    process = await asyncio.to_thread(start_worker, "Plain", "--burst", "--no-burst-deferred")
    assert await asyncio.to_thread(process.wait) == 0
    assert await now.status() is JobStatus.complete
    assert await far.abort()
    process = await asyncio.to_thread(start_worker, "Plain", "--burst")
    assert await asyncio.to_thread(process.wait) == 0
    assert await later.status() is JobStatus.complete
    assert sorted(ledger.ids()) == ["later", "now"]


async def test_check(pool, start_worker, settings):
    process = await asyncio.to_thread(start_worker, "Plain", "--check")
    assert await asyncio.to_thread(process.wait) == 1
    running = await asyncio.to_thread(start_worker, "Plain")
    await asyncio.to_thread(running.wait_ready)
    await wait_until_async(lambda: pool.get("arq:queue:health-check"))
    process = await asyncio.to_thread(start_worker, "Plain", "--check")
    assert await asyncio.to_thread(process.wait) == 0


def test_custom_log_dict(start_worker):
    process = start_worker("Plain", "--custom-log-dict", "jobs.LOG", "--burst")
    assert process.wait() == 0
    assert "CUSTOM Starting worker" in process.log()


def test_a_log_dict_that_cannot_be_imported():
    result = CliRunner().invoke(main, ["arq", "delayadapters.arq.worker", "--custom-log-dict", "nowhere.LOG"])
    assert result.exit_code == 2
    assert "nowhere.LOG" in result.output


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose(verbose):
    """arq's own levels, and ours beside them."""
    from delayadapters.arq.command import _log_config

    config = _log_config(verbose)
    assert {name: one["level"] for name, one in config["loggers"].items()} == {
        "arq": "DEBUG" if verbose else "INFO",
        "delayadapters": "DEBUG" if verbose else "INFO",
    }
    assert config["handlers"].keys() == default_log_config(verbose)["handlers"].keys()


def test_watch(start_worker, tmp_path):
    watched = tmp_path / "watched"
    watched.mkdir()
    process = start_worker("Plain", "--watch", str(watched)).wait_ready()

    def reloaded():
        (watched / "file.py").write_text("x")
        (watched / "file.py").unlink()
        return "reloading" in process.log() and process.log().count("Starting worker") >= 2

    wait_until(reloaded, timeout=90, interval=0.3)


def test_help_imports_no_framework():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "arq-migrate" in result.output
    code = (
        "import sys; from click.testing import CliRunner; from delayadapters.cli import main; "
        "CliRunner().invoke(main, ['--help']); print('arq' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_commands_options_are_arqs():
    from arq.cli import cli

    from delayadapters.arq.command import arq

    names = {option for parameter in cli.params for option in parameter.opts}
    assert names <= {option for parameter in arq.params for option in parameter.opts}


def test_settings_that_cannot_be_imported():
    result = CliRunner().invoke(main, ["arq", "nowhere.Settings"])
    assert result.exit_code == 2
    assert "nowhere.Settings" in result.output


def test_a_framework_that_is_not_installed(monkeypatch):
    import importlib

    def missing(name, *args):
        raise ModuleNotFoundError("No module named 'arq'", name="arq")

    monkeypatch.setattr("delayadapters.cli.import_module", missing)
    assert importlib.import_module is not missing
    result = CliRunner().invoke(main, ["arq", "jobs.Settings"])
    assert result.exit_code == 1
    assert "pip install 'delayadapters[arq]'" in result.output
