"""Builds the automaton of the regular expression on the standard input, within limits: SECONDS of a processor, BYTES.

A process of its own, since the library builds without bound and cannot be interrupted. It ends well, or with anything
else where the limits do not suffice; what is no expression at all is left to whoever asked.
"""

import contextlib
import resource
import sys


def main() -> None:
    """Builds it."""
    import outlines_core

    seconds, size = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    expression = sys.stdin.buffer.read().decode('utf-8', 'surrogatepass')
    with contextlib.suppress(ValueError):
        bytes_ = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
        outlines_core.Index(expression, bytes_).get_transitions()


if __name__ == '__main__':
    main()
