"""Fixtures for tests that need a Kubernetes cluster: one cluster for the whole session, and a namespace for each test."""

import uuid
from collections.abc import Generator, Iterator

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.requirements import missing
from tests.cluster.situation import HEADING


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster with one node, shared by all tests of the session. Leave it as you found it."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    shared = Cluster(nodes=1)
    with shared:
        yield shared
    assert shared.leftovers() == []


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own; what is in it goes when the test ends."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.make_namespace(name)
    yield name
    cluster.delete("pod", "--all", namespace=name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails on the cluster shows what the cluster looks like, while it still does."""
    report = yield
    values = getattr(item, "funcargs", None) or {}
    cluster = values.get("cluster")
    if report.failed and isinstance(cluster, Cluster) and HEADING not in report.longreprtext:
        report.sections.append(("cluster", cluster.situation(values.get("namespace", "default"))))
    return report
