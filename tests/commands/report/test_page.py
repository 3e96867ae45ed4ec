"""The file and the server, without a browser: nothing of a run is markup, nothing but our scripts
may run, and nobody from elsewhere is answered."""

import base64
import gzip
import hashlib
import http.client
import json
import re

import pytest
from commands.report.made_runs import make_run, write_results

from ratchet.commands.report import write_report
from ratchet.commands.report.page import SCRIPTS, STYLES, make_live_page, read_asset
from ratchet.commands.report.server import HOST, bind, make_app, serve_forever
from ratchet.errors import PortBusy, RunDirectoryError
from ratchet.runs.run_dir import RunDirectory
from ratchet.web.server import ServerThread

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!--"
OUR_SCRIPTS = [name for name in SCRIPTS if not name.startswith("vendor/")]


def test_nothing_of_a_run_is_part_of_the_markup(tmp_path):
    make_run(tmp_path / "run", say=HOSTILE, steps=2)
    page = write_report([tmp_path / "run"], rollouts=64).read_text(encoding="utf-8")
    assert "onerror" not in page
    assert "<img" not in page
    packed = re.search(
        r'<script type="application/gzip" id="sample-0">([A-Za-z0-9+/=]*)</script>', page
    )
    details = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert details[0]["messages"][-1]["content"].startswith(HOSTILE)


def test_a_title_is_escaped(tmp_path):
    make_run(tmp_path / "<b>&", steps=1)
    page = write_report([tmp_path / "<b>&"], rollouts=0).read_text(encoding="utf-8")
    assert "<title>&lt;b&gt;&amp;</title>" in page


def test_only_our_scripts_may_run(tmp_path):
    make_run(tmp_path / "run", steps=1)
    page = write_report([tmp_path / "run"], rollouts=8).read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    allowed = set(re.findall(r"'sha256-([^']*)'", policy))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert {
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    } == allowed
    assert len(scripts) == len(SCRIPTS)
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "connect-src 'self'" in make_live_page()


@pytest.mark.parametrize("name", [*OUR_SCRIPTS, "page.html", "style.css", "rollouts.css"])
def test_our_assets_make_no_markup_of_texts_and_name_no_place(name):
    text = read_asset(name)
    for unsafe in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "://",
        "<!--//",
    ):
        assert unsafe not in text
    assert "</script" not in text or name == "page.html"
    assert text.count("\n") <= 400


def test_every_asset_is_in_the_page():
    page = make_live_page()
    for name in (*SCRIPTS, *STYLES):
        assert read_asset(name) in page


def test_a_report_of_the_same_run_is_the_same_file(tmp_path):
    make_run(tmp_path / "run", steps=3)
    first = write_report([tmp_path / "run"], tmp_path / "a.html", rollouts=16).read_bytes()
    assert write_report([tmp_path / "run"], tmp_path / "b.html", rollouts=16).read_bytes() == first


def test_where_a_report_goes(tmp_path):
    directory = make_run(tmp_path / "run", steps=1)
    assert write_report([directory.path], rollouts=1) == directory.path / "report.html"
    with pytest.raises(RunDirectoryError, match="can't be written"):
        write_report([directory.path], tmp_path / "nowhere" / "x.html", rollouts=1)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        write_report([tmp_path], rollouts=1)


# --- the server


@pytest.fixture
def ask(tmp_path):
    """Status and body of a request; `host`: what it says it asks."""
    make_run(tmp_path / "runs" / "a", steps=3)
    server = ServerThread(make_app(tmp_path / "runs"), bind(0))
    port = server.address[1]

    def get(path, host=None):
        connection = http.client.HTTPConnection(HOST, port, timeout=20)
        connection.request("GET", path, headers={"Host": host or f"{HOST}:{port}"})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    yield get
    server.close()


def test_the_server_answers_what_the_page_asks(ask):
    assert ask("/")[0] == 200
    assert list(json.loads(ask("/api/runs")[1])) == ["a"]
    assert ask("/api/run?run=a&after=1")[0] == 200
    assert ask("/api/rollouts?run=a&known=")[0] == 200
    assert [
        each["row_index"]
        for each in json.loads(ask("/api/details?run=a&step=2&row_indices=0,3")[1])
    ] == [0, 3]
    assert json.loads(ask("/api/search?run=a&text=good+2.1")[1]) == {
        "found": [[2, 1], [2, 5]],
        "since": None,
    }


def test_the_server_gives_held_out_answers_and_files(ask, tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "a")
    write_results(directory, "rl/step-00000002", [("t/0", "1+1", 1.0, "2")])
    (evaluation,) = json.loads(ask("/api/evaluations?run=a")[1])
    assert evaluation == {"name": "rl/step-00000002", "stage": "rl", "step": 2}
    answers = json.loads(ask("/api/answers?run=a&name=rl/step-00000002")[1])
    assert [row[-1] for row in answers["rows"]] == ["2"]
    assert "kind: bytes" in json.loads(ask("/api/files?run=a")[1])["config"]
    assert json.loads(ask("/api/runs")[1])["a"]["progress"]["step"] == 3


def test_a_run_that_begins_later_is_found(ask, tmp_path):
    make_run(tmp_path / "runs" / "b", steps=1)
    assert list(json.loads(ask("/api/runs")[1])) == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/run?run=../a", 400, b"there is no run '../a'"),
        ("/api/run", 400, b"run"),
        ("/api/details?run=a&step=x&row_indices=0", 400, b"invalid literal"),
        ("/api/details?run=a&step=9&row_indices=0", 400, b"step 9 is not in the record"),
        ("/api/answers?run=a&name=../../b", 400, b"has no evaluation"),
        ("/etc/passwd", 404, b"no such page"),
        ("/../../etc/passwd", 404, b"no such page"),
    ],
)
def test_the_server_refuses(ask, path, status, says):
    found, body = ask(path)
    assert found == status
    assert says in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:80", ""]
)
def test_a_page_of_somebody_else_can_read_nothing(ask, host):
    assert ask("/api/runs", host or "[]")[0] == 403


def test_localhost_is_this_machine_too(ask):
    assert ask("/api/runs", "localhost:80")[0] == 200


def test_a_port_that_is_taken(tmp_path):
    make_run(tmp_path / "a", steps=1)
    with bind(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortBusy, match=f"port {port} of 127.0.0.1 can't be used"):
            serve_forever(tmp_path, port, say=lambda text: None)
