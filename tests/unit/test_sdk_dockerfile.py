"""Dockerfiles are read as Docker's reference says, and refused line by line."""

from __future__ import annotations

import pytest

from forkd.errors import InvalidRequest
from forkd.sdk._dockerfile import limits
from forkd.sdk._dockerfile.reading import read
from forkd.sdk._dockerfile.settings import Config, apply
from forkd.sdk._dockerfile.stages import parse
from forkd.sdk._dockerfile.words import Expander


def lines(text: str) -> list[tuple[int, str, str]]:
    found, _ = read(text, "Dockerfile")
    return [(each.line, each.keyword, each.rest) for each in found]


# Reading: the cases of Docker's own reference


def test_comments_are_removed_before_an_instruction_is_read() -> None:
    text = "# first\n   # indented\nRUN echo hello \\\n# comment\n  # comment\n\nworld\n"
    assert lines(text) == [(3, "RUN", "echo hello world")]


def test_what_looks_like_a_comment_in_an_argument_is_none() -> None:
    assert lines("RUN echo 'we are running some # of cool things'") == [
        (1, "RUN", "echo 'we are running some # of cool things'")
    ]


def test_keywords_have_no_case_and_blanks_before_them_are_ignored() -> None:
    assert lines("      run echo hello\n  \tFrom a") == [(1, "RUN", "echo hello"), (2, "FROM", "a")]


def test_with_the_usual_escape_a_windows_path_swallows_the_next_line() -> None:
    assert lines("COPY testfile.txt c:\\\nRUN dir c:\\\n") == [
        (1, "COPY", "testfile.txt c:RUN dir c:")
    ]


def test_with_another_escape_it_does_not() -> None:
    text = "# escape=`\nFROM a\nCOPY testfile.txt c:\\\nRUN dir `\n  c:\\\n"
    assert lines(text)[1:] == [(3, "COPY", "testfile.txt c:\\"), (4, "RUN", "dir   c:\\")]
    assert read(text, "Dockerfile")[1] == "`"


@pytest.mark.parametrize(
    "text",
    [
        "FROM a\n# escape=`\nRUN x",  # behind an instruction
        "# about my dockerfile\n# escape=`\nFROM a",  # behind a comment
        "# unknowndirective=value\n# escape=`\nFROM a",
    ],
)
def test_a_directive_behind_anything_else_is_a_comment(text: str) -> None:
    assert read(text, "Dockerfile")[1] == "\\"


def test_directives_may_have_blanks_and_stand_together() -> None:
    assert read("#syntax=docker/dockerfile:1\n #  ESCAPE = `\nFROM a", "D")[1] == "`"


def test_blanks_behind_the_escape_do_not_end_the_instruction() -> None:
    assert lines("RUN a \\  \n  b\nRUN c \\\\\nRUN d") == [
        (1, "RUN", "a   b"),
        (3, "RUN", "c \\\\"),
        (4, "RUN", "d"),
    ]


def test_an_instruction_may_be_cut_at_the_end_of_the_file_and_lines_may_end_in_crlf() -> None:
    assert lines("\ufeffFROM a\r\nRUN x \\") == [(1, "FROM", "a"), (2, "RUN", "x")]


def test_the_json_form_is_told_from_the_shell_form() -> None:
    found, _ = read('RUN ["a", "b c"]\nRUN [\'a\']\nCMD []\nENV ["a"]=b', "Dockerfile")
    assert [each.words for each in found] == [("a", "b c"), None, (), None]


def test_flags_are_taken_from_the_front() -> None:
    (found,), _ = read("COPY --from=build  --chown=1:2 --link -- a --b /c", "Dockerfile")
    assert found.flags == (("from", "build"), ("chown", "1:2"), ("link", None))
    assert found.rest == "a --b /c"
    assert found.shown == "COPY --from=build --chown=1:2 --link a --b /c"


def test_heredocs_are_texts_behind_the_line() -> None:
    text = "RUN <<EOF\necho 1\n# no comment\nEOF\n"
    text += "COPY <<-'ONE' <<\"TWO\" /to/\n\ta\n\tONE\n b\nTWO\nRUN x"
    first, second, third = read(text, "Dockerfile")[0]
    assert [h.content for h in first.heredocs] == ["echo 1\n# no comment\n"]
    assert [(h.name, h.content, h.expands) for h in second.heredocs] == [
        ("ONE", "a\n", False),
        ("TWO", " b\n", False),
    ]
    assert first.heredocs[0].expands
    assert (third.line, third.rest) == (10, "x")


def test_a_shift_and_a_here_string_are_no_heredocs() -> None:
    assert lines("RUN echo $((1<<4)) <<< word\nRUN a") == [
        (1, "RUN", "echo $((1<<4)) <<< word"),
        (2, "RUN", "a"),
    ]


def test_a_heredoc_that_is_cut_short_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^D:2: the heredoc <<EOF is cut short"):
        read("FROM a\nRUN <<EOF\necho 1\n", "D")


def test_the_size_and_the_number_of_instructions_have_limits() -> None:
    most = limits.DOCKERFILE_BYTES_MAX
    read(f"FROM a\n{'#' * (most - 7)}", "D")
    with pytest.raises(InvalidRequest, match=rf"^D:1: .*longer than {most} bytes"):
        read(f"FROM a\n{'#' * (most - 6)}", "D")
    count = limits.DOCKERFILE_INSTRUCTIONS_MAX
    read("FROM a\n" * count, "D")
    with pytest.raises(InvalidRequest, match=rf"^D:{count + 1}: more than {count} instructions"):
        read("FROM a\n" * (count + 1), "D")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# escape=x\nFROM a", "D:1: escape must be"),
        ("# escape=`\n# escape=`\nFROM a", "D:2: the directive 'escape' is there twice"),
    ],
)
def test_wrong_directives_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(text, "D")


# Words


VARIABLES = {"foo": "bar", "empty": "", "path": "/a/b/c.tar.gz"}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$foo", "bar"),
        ("${foo}", "bar"),
        ("\\$foo", "$foo"),
        ("\\${foo}", "${foo}"),
        ("'$foo'", "$foo"),
        ('"$foo"', "bar"),
        ('"\\$foo \\a"', "$foo \\a"),
        ("a\\ b", "a b"),
        ("${foo}_x$foo", "bar_xbar"),
        ("$none|${none}", "|"),
        ("${none:-word}", "word"),
        ("${foo:-word}", "bar"),
        ("${empty:-word}|${empty-word}", "word|"),
        ("${none-word}", "word"),
        ("${foo:+word}|${none:+word}|${empty:+w}|${empty+w}", "word|||w"),
        ("${none:-${foo}}", "bar"),
        ("${none:-'a}b'}", "a}b"),
        ("${foo:?word}", "bar"),
        ("${path#*/}|${path##*/}", "a/b/c.tar.gz|c.tar.gz"),
        ("${path%.*}|${path%%.*}", "/a/b/c.tar|/a/b/c"),
        ("${path/a/x}|${path//a/x}", "/x/b/c.tar.gz|/x/b/c.txr.gz"),
        ("cost $ 5$", "cost $ 5$"),
        ("$$foo|$1|${1}", "foo||"),
    ],
)
def test_variables_are_replaced(word: str, value: str) -> None:
    assert Expander("\\", VARIABLES).word(word) == value


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("'a", "single quote"),
        ('"a', "double quote"),
        ("${foo", "foo"),
        ("${}", "names no variable"),
        ("${foo:x}", "no form"),
        ("${none:?is needed}", "none: is needed"),
        ("${none?}", "none: it is not set"),
    ],
)
def test_malformed_words_are_refused(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Expander("\\", VARIABLES).word(word)


def test_words_are_split_outside_of_quotes_alone() -> None:
    words = Expander("\\", {"two": "a b"})
    assert words.words("x\\ y 'a b'  $two \"q w\"") == ["x y", "a b", "a b", "q w"]


def test_unset_variables_are_noted_and_texts_keep_their_quotes() -> None:
    words = Expander("\\", {"a": "1"})
    assert words.text("'$a' \"${b:-2}\" \\$a\n") == "'1' \"2\" $a\n"
    words.word("$c")
    assert words.unknown == {"c"}


# Stages


def test_stages_have_names_and_numbers() -> None:
    found = parse("ARG V=1\nFROM a:$V AS Build\nRUN x\nFROM b\nCOPY --from=build /a /b\n", "D")
    assert [(s.name, s.base, s.line) for s in found.stages] == [
        ("build", "a:$V", 2),
        (None, "b", 4),
    ]
    assert found.target(None).index == 1
    assert found.target("BUILD").index == found.target("0").index == 0
    with pytest.raises(InvalidRequest, match=r"no stage 'test'; its stages are build, 1"):
        found.target("test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "D:1: there is no FROM"),
        ("# nothing", "D:1: there is no FROM"),
        ("RUN x\nFROM a", "D:1: RUN is before the first FROM"),
        ("FROM a\n\nONBUILD RUN x", "D:3: ONBUILD is not supported: "),
        ("FROM a\nCOPPY a b", "D:2: 'COPPY' is no instruction; did you mean COPY"),
        ("FROM a\nRUN --mount=type=cache,target=/x y", "D:2: RUN --mount is not supported: "),
        ("FROM a\nRUN --network=none y", "D:2: RUN --network is not supported: "),
        ("FROM a\nCOPY --form=b a b", "D:2: COPY has no flag --form; its flags are: --chmod"),
        ("FROM a\nCOPY --chown a b", "D:2: --chown needs a value"),
        ("FROM a\nCOPY --chown=1 --chown=2 a b", "D:2: --chown is there twice"),
        ("FROM a\nRUN", "D:2: RUN needs an argument"),
        ("FROM a b", "D:1: FROM is `FROM IMAGE"),
        ("FROM a AS 1x", "D:1: '1x' is no name of a stage"),
        ("FROM a AS x\nFROM b AS X", "D:2: another stage is called 'x'"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(text, "D")
    assert str(caught.value).startswith(message)


# Settings


def settled(text: str, config: Config | None = None) -> Config:
    config = config or Config(env={"PATH": "/bin", "abc": "hello"})
    for each in read(text, "D")[0]:
        config = apply(config, each, Expander("\\", config.env))
    return config


def test_env_is_read_in_both_forms_and_over_what_was_before_the_line() -> None:
    env = settled('ENV abc=bye def=$abc\nENV ghi=$abc\nENV a "b" c\nENV x="1 2" y=3\\ 4').env
    assert env["def"] == "hello"
    assert env["ghi"] == "bye"
    assert (env["a"], env["x"], env["y"]) == ("b c", "1 2", "3 4")
    assert settled("ENV PATH=/opt/bin:$PATH").env["PATH"] == "/opt/bin:/bin"


def test_working_directories_build_on_each_other() -> None:
    assert settled("WORKDIR /a\nWORKDIR b\nWORKDIR ../c/.").cwd == "/a/c"


def test_programs_have_a_form_with_a_shell_and_one_without() -> None:
    found = settled('ENTRYPOINT ["a", "b"]\nCMD echo $x')
    assert found.program == ("a", "b", "/bin/sh", "-c", "echo $x")
    assert settled('SHELL ["/bin/bash", "-c"]\nCMD x').cmd == ("/bin/bash", "-c", "x")


def test_the_rest_is_kept() -> None:
    found = settled(
        "EXPOSE 80 443/udp 8000-8002\nLABEL a=b \"c d\"='e f'\nSTOPSIGNAL sigint\nUSER app:app\n"
        'VOLUME ["/data"]\nHEALTHCHECK --interval=1m30s --retries=3 CMD curl -f x || exit 1'
    )
    assert found.ports == ("80/tcp", "443/udp", "8000-8002/tcp")
    assert found.labels == {"a": "b", "c d": "e f"}
    assert (found.stop_signal, found.user, found.volumes) == ("SIGINT", "app:app", ("/data",))
    assert found.healthcheck == {
        "test": ("CMD-SHELL", "curl -f x || exit 1"), "interval": "1m30s", "retries": "3"
    }  # fmt: skip
    exact = settled('HEALTHCHECK CMD ["curl", "x"]').healthcheck["test"]
    assert exact == ("CMD", "curl", "x")
    assert settled("HEALTHCHECK NONE").healthcheck == {"test": ("NONE",)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ENV abc", "has no value"),
        ("ENV a=b c", "'c' is not KEY=VALUE"),
        ("WORKDIR $none", "names no folder"),
        ("USER $none", "USER is a name"),
        ("EXPOSE 70000", "ports are 1 to 65535"),
        ("EXPOSE http", "'http' is no port"),
        ("SHELL /bin/bash", "SHELL is a list"),
        ("STOPSIGNAL 9x", "'9X' is no signal|'9x' is no signal"),
        ("HEALTHCHECK curl", "HEALTHCHECK is `HEALTHCHECK"),
        ("HEALTHCHECK --retries=x CMD a", "--retries is a number"),
        ("HEALTHCHECK --timeout=5 CMD a", "--timeout is a time"),
    ],
)
def test_malformed_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settled(text)
