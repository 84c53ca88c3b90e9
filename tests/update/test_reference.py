"""The snapshot: stands in for the policy, gives it back bit by bit, and holds nothing but what is trained."""

from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from support.models import LORA, tiny_model
from support.seeds import shifted
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from pacs_trl.update.reference import SnapshotReference, is_sharded


pytestmark = pytest.mark.trains

IDS = torch.tensor([[3, 4, 5, 6]])


def move(model, seed=1):
    generator = torch.Generator().manual_seed(shifted(seed))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.clone()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=["full", "lora"])
def model(request):
    if request.param == "full":
        return tiny_model()
    torch.manual_seed(shifted(0))
    return get_peft_model(tiny_model(), LORA)


def test_weights_of_another_shape_are_refused():
    """Also those that `copy_` would broadcast."""
    snapshot = SnapshotReference(tiny_model())
    for wrong in (snapshot.state_dict()[1:], [copy[:1] for copy in snapshot.state_dict()]):
        with pytest.raises(ValueError, match="of the reference in the checkpoint do not fit"):
            snapshot.load_state_dict([copy.clone() for copy in wrong])


@pytest.mark.parametrize("offload", [False, True])
def test_stands_in_for_the_policy_and_gives_it_back(model, offload):
    """Also after an exception; parameters keep their memory, and the copies are of trained parameters alone."""
    first = logits(model)
    snapshot = SnapshotReference(model, offload=offload)
    move(model)
    moved, now, pointers = logits(model), weights(model), [p.data_ptr() for p in model.parameters()]
    assert not torch.equal(first, moved)
    with pytest.raises(KeyError), snapshot.in_place_of_policy():
        assert torch.equal(logits(model), first)
        raise KeyError
    assert torch.equal(logits(model), moved) and equal(weights(model), now)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    copies, trained = snapshot.state_dict(), [p for p in model.parameters() if p.requires_grad]
    assert sum(c.numel() for c in copies) == sum(p.numel() for p in trained)
    assert not {c.data_ptr() for c in copies} & set(pointers)
    snapshot.renew()
    move(model, seed=2)
    with snapshot.in_place_of_policy():
        assert torch.equal(logits(model), moved)
    before = weights(model)  # an optimizer step afterwards moves the policy
    model(IDS).logits.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for p, b in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), b - 0.1 * (0 if p.grad is None else p.grad))


def test_gives_back_every_bit():
    """Also those that arithmetic would lose: negative zero, the smallest numbers, infinity and NaN."""
    model = torch.nn.Linear(5, 1, bias=False)
    snapshot = SnapshotReference(model)
    special = torch.tensor([[-0.0, 1e-45, float("inf"), float("nan"), 3e38]])
    with torch.no_grad():
        model.weight.copy_(special)
    bits = model.weight.detach().view(torch.int32).clone()
    with snapshot.in_place_of_policy():
        assert model.weight.isfinite().all()
    assert torch.equal(model.weight.detach().view(torch.int32), bits)


class PartitionedByZeRO3:
    """What a snapshot needs of a parameter under ZeRO-3: this process's part stands in `ds_tensor`."""

    def __init__(self, parameter, persistent):
        parameter.ds_tensor = parameter.data.flatten()[:2].clone()
        parameter.ds_status = SimpleNamespace(name="AVAILABLE" if persistent else "NOT_AVAILABLE")
        parameter.partition = lambda parameters: self.calls.append("partition")
        parameter.all_gather = lambda parameters: self.calls.append(("all_gather", parameters[0].ds_tensor.tolist()))
        self.calls = []


@pytest.mark.parametrize("persistent", [False, True])
def test_parameters_partitioned_by_zero3_are_exchanged_in_shards(persistent):
    model = torch.nn.Linear(3, 1, bias=False)
    assert not is_sharded(model)
    partitioned = PartitionedByZeRO3(model.weight, persistent)
    model.weight.ds_tensor = torch.tensor([1.0, 2.0])
    assert is_sharded(model)
    snapshot = SnapshotReference(model)
    model.weight.ds_tensor += 5
    with snapshot.in_place_of_policy():
        assert model.weight.ds_tensor.tolist() == [1.0, 2.0]
    assert model.weight.ds_tensor.tolist() == [6.0, 7.0]
    # small parameters stay gathered between uses, so they are gathered anew from the parts that were exchanged
    exchanged = ["partition", ("all_gather", [1.0, 2.0]), "partition", ("all_gather", [6.0, 7.0])]
    assert partitioned.calls == (exchanged if persistent else [])
    snapshot.renew()
    assert snapshot.state_dict()[0].tolist() == [6.0, 7.0]


# FSDP2 in a group of one process; two processes are in tests/distributed ---------------------------------------------


@pytest.fixture
def process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("forward_first", [False, True])
def test_a_snapshot_exchanges_the_shards_of_fsdp2(process_group, forward_first):
    """A forward pass leaves gathered copies in place of the parameters of the outermost module. They are freed later,
    so a snapshot that listed them would exchange freed memory, or nothing."""
    model = tiny_model()
    for module in (*model.model.layers, model):
        fully_shard(module)
    assert isinstance(model, FSDPModule)
    first = logits(tiny_model())
    if forward_first:
        torch.testing.assert_close(logits(model), first)
    snapshot = SnapshotReference(model)
    assert is_sharded(model)
    assert all(isinstance(p, DTensor) for p in snapshot._parameters)
    for p in snapshot._parameters:
        with torch.no_grad():
            p.to_local().mul_(1.5)
    model.reshard()
    moved = logits(model)
    assert not torch.allclose(moved, first)
    for _ in range(2):
        with snapshot.in_place_of_policy():
            torch.testing.assert_close(logits(model), first)
        assert torch.equal(logits(model), moved)
