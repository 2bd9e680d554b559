"""Small nouns for tests of what reads them: a profile, a plan, a cluster and a comparison that hang together."""

from __future__ import annotations

from asa.ir import bench as b
from asa.ir.cluster import Cluster, CollectiveTable, Contention, Device, Level, Overlap
from asa.ir.graph import Component, LayerGraph, TensorSplit
from asa.ir.measurements import EpochRecord, Measurements, Verdict
from asa.ir.plan import Assignment, Baseline, Certificate, DataDegree, Plan, Prediction, Stage, TensorDegree
from asa.ir.profile import DeviceRecord, Profile, Provenance, Stat, Timing, UpdateTiming, WholeStep

MIB = 1024**2


def stat(median: float, n: int = 5) -> Stat:
    """A time with ten per cent of spread."""
    return Stat(median=median, p10=0.9 * median, p90=1.1 * median, n=n)


def component(name: str, parameters: int, *, splits: bool) -> Component:
    """A convolution; a split one divides everything."""
    split = TensorSplit(
        max_degree=64,
        parameter_bytes=parameters,
        num_parameter_tensors=2,
        flops_per_sample=1e8,
        saved_bytes_per_sample=65536.0,
        collectives=(),
        entry_partial=True,
        exit_partial=False,
    )
    return Component(
        name=name,
        kind="convolution",
        modules=(name,),
        num_parameter_tensors=2,
        parameter_bytes=parameters,
        largest_parameter_bytes=parameters,
        buffer_bytes=0,
        flops_per_sample=1e8,
        output_bytes_per_sample=4096.0,
        saved_bytes_per_sample=65536.0,
        batch_norm=False,
        split=split if splits else None,
        why_whole="" if splits else "too narrow",
    )


def profile(created: str = "2025-01-02T03:04:05+00:00", model: str = "tiny") -> Profile:
    """Three components, microbatches 1 to 8, degrees 1 and 2."""
    parts = (
        component("stem", MIB, splits=False),
        component("body.0", 4 * MIB, splits=True),
        component("head", 64 * MIB, splits=True),
    )
    timings = [
        Timing(
            component=c.name,
            microbatch=m,
            tensor_degree=t,
            forward=stat(0.002 * m / t + 0.0005),
            backward=stat(0.004 * m / t + 0.0005),
            saved_bytes=65536 * m // t,
            transient_bytes=4096,
        )
        for c in parts
        for t in ((1, 2) if c.split else (1,))
        for m in (1, 2, 4, 8)
    ]
    updates = [
        UpdateTiming(component=c.name, tensor_degree=t, optimizer="sgd", step=stat(1e-4 * c.parameter_bytes / MIB / t))
        for c in parts
        for t in ((1, 2) if c.split else (1,))
    ]
    return Profile(
        model_spec=model,
        model_fingerprint="0123456789abcdef",
        graph=LayerGraph(
            model=model, input_shape=(3, 32, 32), num_classes=10, input_bytes_per_sample=12288.0, components=parts
        ),
        device=DeviceRecord(type="cpu", name="Test CPU", memory_bytes=2**33, threads=1),
        precision="fp32",
        global_batch=8,
        timings=tuple(timings),
        updates=tuple(updates),
        dispatch_floor_s=1e-5,
        whole=(WholeStep(microbatch=8, whole=stat(0.15), components_s=0.147),),
        skipped=("microbatch 1 of head",),
        provenance=Provenance(origin="measured", created=created, asa_version="0", torch_version="2"),
    )


def cluster(num_devices: int = 2, name: str = "box") -> Cluster:
    """CPU ranks on one level of links."""
    points = ((1024, 1e-4), (MIB, 2e-3), (64 * MIB, 1e-1))
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
    tables = tuple(
        CollectiveTable(op=op, ranks=n, points=points, status="measured", source="a test")
        for op in ops
        for n in range(2, num_devices + 1)
    )
    return Cluster(
        name=name,
        backend="gloo",
        device=Device(name="Test CPU", type="cpu", memory_bytes=2**33),
        num_devices=num_devices,
        levels=(Level(name="loopback", devices=num_devices, tables=tables),),
        contention=tuple(Contention(ranks=n, slowdown=1.0 + 0.05 * (n - 1)) for n in range(1, num_devices + 1)),
        overlap=Overlap(compute_slowdown=1.2, communication_slowdown=1.1),
        status="measured",
        source="a test",
    )


def plan(strategy: str = "asa", step: float = 0.5, best: float = 0.6) -> Plan:
    """Two ranks: data-parallel stem and body, tensor-parallel head."""

    def assigned(name: str, data: int, tensor: int) -> Assignment:
        return Assignment(
            name=name,
            stage=0,
            data=DataDegree(strategy="replicate", degree=data),
            tensor=TensorDegree(strategy="tensor" if tensor > 1 else "none", degree=tensor),
        )

    made = profile()
    return Plan(
        model_spec="tiny",
        model_fingerprint=made.model_fingerprint,
        profile_fingerprint="feedfeedfeedfeed",
        cluster="box",
        cluster_fingerprint="beefbeefbeefbeef",
        input_shape=(3, 32, 32),
        num_classes=10,
        strategy=strategy,
        gpus=2,
        global_batch=8,
        precision="fp32",
        optimizer="sgd",
        device_type="cpu",
        components=(assigned("stem", 2, 1), assigned("body.0", 2, 1), assigned("head", 1, 2)),
        stages=(Stage(ranks=(0, 1)),),
        schedule="none",
        num_microbatches=1,
        prediction=Prediction(
            step_time_s=step,
            step_time_low_s=0.9 * step,
            step_time_high_s=1.1 * step,
            compute_s=0.9 * step,
            exposed_communication_s=0.1 * step,
            hidden_communication_s=0.05,
            update_s=0.01,
            bubble_s=0.0,
            memory_bytes_per_rank=(200 * MIB, 210 * MIB),
            samples_per_s=8 / step,
        ),
        certificate=Certificate(
            solver="ilp", status="optimal", lower_bound_s=step, gap=0.0, space="two layouts", solve_s=0.01
        ),
        baselines=(
            Baseline(name="ddp", step_time_s=best, memory_bytes_max=300 * MIB, fits=True),
            Baseline(name="single", step_time_s=2 * best, memory_bytes_max=2**34, fits=False, why_not="16 GiB of 8"),
        ),
        origin="measured",
        notes=("a note",),
    )


def epoch(number: int = 1) -> EpochRecord:
    """One epoch: predicted 10 % above measured."""
    return EpochRecord(
        epoch=number,
        step=10 * number,
        seconds=12.0,
        train_loss=2.0,
        validation_loss=1.5,
        validation_accuracy=0.5,
        learning_rate=0.1,
        measurements=Measurements(
            plan_fingerprint="f00d",
            strategy="asa",
            num_ranks=2,
            global_batch=8,
            step_time=stat(0.5),
            predicted_step_time_s=0.55,
            communication_s=0.05,
            data_wait_s=0.001,
            peak_memory_bytes=(100 * MIB, 110 * MIB),
            predicted_memory_bytes=(112 * MIB, 112 * MIB),
        ),
        verdict=Verdict(
            action="keep", reason="nothing to gain", measured_s=0.5, predicted_s=0.55, best_possible_gain=0.004
        ),
    )


def bench() -> b.Bench:
    """Two models; one cell that could not run."""
    times = {"single": 1.0, "ddp": 0.62, "tensor": 0.71, "hybrid": 0.62, "asa": 0.5}
    results = []
    for model in ("tiny", "small"):
        for i, (strategy, time) in enumerate(times.items()):
            results.append(
                b.BenchResult(
                    model=model,
                    strategy=strategy,
                    ranks=1 if strategy == "single" else 2,
                    global_batch=64,
                    step_time_s=stat(time, 30),
                    predicted_step_time_s=time * (0.95 + 0.03 * i),
                    samples_per_s=64 / time,
                    communication_s=0.0 if strategy == "single" else 0.1 * time,
                    communication_low_s=0.0 if strategy == "single" else 0.08 * time,
                    communication_high_s=0.0 if strategy == "single" else 0.12 * time,
                    peak_memory_bytes=(300 - 20 * i) * MIB,
                    predicted_memory_bytes=(310 - 20 * i) * MIB,
                    plan_fingerprint=f"{i:016x}",
                    components=plan().components,
                    accuracy=tuple(
                        b.AccuracyPoint(
                            epoch=float(e),
                            seconds=10.0 * e,
                            train_loss=2 / e,
                            validation_loss=2.1 / e,
                            validation_accuracy=v,
                        )
                        for e, v in ((1, 0.3), (2, 0.45), (3, 0.52))
                    ),
                )
            )
    results.append(
        b.BenchResult(
            model="tiny",
            strategy="fsdp",
            ranks=2,
            global_batch=64,
            step_time_s=None,
            predicted_step_time_s=0.9,
            why_not="1.2 GiB of 1.0 GiB <too much>",
        )
    )
    return b.Bench(
        created="2025-01-02T03:04:05+00:00",
        started="2025-01-02T03:05:05+00:00",
        environment=b.BenchEnvironment(
            device_type="cpu",
            device_name="Test CPU",
            num_devices=2,
            cpu_cores=2,
            backend="gloo",
            python_version="3.11",
            torch_version="2",
            asa_version="0",
        ),
        settings=b.BenchSettings(
            models=("tiny", "small"),
            strategies=(*times, "fsdp"),
            gpus=2,
            global_batch=64,
            input_shape=(3, 32, 32),
            num_classes=10,
            precision="fp32",
            optimizer="sgd",
            learning_rate=0.1,
            data="synthetic",
            data_source="a test",
            samples_per_epoch=1000,
            steps_per_turn=5,
            seed=0,
            budget_s=60.0,
        ),
        sealed=(
            b.SealedPlan(
                model="tiny",
                strategy="asa",
                plan_fingerprint="f00d",
                profile_fingerprint="feed",
                profile_created="2025-01-01T00:00:00+00:00",
                cluster="box",
                cluster_fingerprint="beef",
                written="2025-01-02T03:04:06+00:00",
            ),
        ),
        results=tuple(results),
        scaling=tuple(
            b.ScalingPoint(
                model=model,
                strategy=s,
                ranks=n,
                predicted_s=1 / (1 + (n - 1) * f),
                measured_s=0.62 if n == 2 else 1.0 if n == 1 else None,
            )
            for model in ("tiny", "small")
            for s, f in (("single", 0.0), ("ddp", 0.7), ("asa", 0.9))
            for n in (1, 2, 4, 8)
        ),
        comparisons=(
            b.Comparison(model="tiny", left="ddp", right="ddp", pairs=30, ratio=1.001, low=0.98, high=1.02),
            b.Comparison(model="tiny", left="asa", right="ddp", pairs=30, ratio=0.81, low=0.79, high=0.83),
        ),
        notes=("a note",),
    )
