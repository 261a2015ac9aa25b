// Command algorithm times kube-scheduler's own decision, without API server, queue or binding: UpdateSnapshot, SchedulePod with
// the default profile, AssumePod, pod after pod. It prints one line of JSON.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/metrics"
	"k8s.io/kubernetes/pkg/scheduler/profile"
)

const gpu = v1.ResourceName("nvidia.com/gpu")

var (
	nodes      = flag.Int("nodes", 1213, "nodes")
	nodeGPUs   = flag.Int64("node-gpus", 8, "GPUs of a node")
	nodeCPU    = flag.Int64("node-cpu-millis", 128000, "CPU of a node")
	nodeMemory = flag.Int64("node-memory-mib", 1<<20, "memory of a node")
	pods       = flag.Int("pods", 5000, "pods that are timed")
	before     = flag.Int("before", 1000, "pods placed before")
	podGPUs    = flag.Int64("pod-gpus", 1, "GPUs of a pod")
	podCPU     = flag.Int64("pod-cpu-millis", 4000, "CPU of a pod")
	podMemory  = flag.Int64("pod-memory-mib", 16384, "memory of a pod")
	percent    = flag.Int("percent", 0, "percentageOfNodesToScore; 0 lets the scheduler choose")
	threads    = flag.Int("threads", 16, "parallelism; 16 is the default of kube-scheduler")
)

func main() {
	flag.Parse()
	result, err := run(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		os.Exit(1)
	}
}

func run(ctx context.Context) (map[string]any, error) {
	metrics.Register()
	sched, err := newScheduler(ctx)
	if err != nil {
		return nil, err
	}
	logger := klog.FromContext(ctx)
	for number := range *nodes {
		sched.Cache.AddNode(logger, node(number))
	}
	if _, err := place(ctx, sched, 0, *before); err != nil {
		return nil, err
	}
	cpu, start := cpuSeconds(), time.Now()
	placed, err := place(ctx, sched, *before, *pods)
	if err != nil {
		return nil, err
	}
	return map[string]any{"seconds": time.Since(start).Seconds(), "cpu_seconds": cpuSeconds() - cpu, "placed": placed}, nil
}

func newScheduler(ctx context.Context) (*scheduler.Scheduler, error) {
	client := fake.NewClientset()
	factory := informers.NewSharedInformerFactory(client, 0)
	score := int32(*percent)
	sched, err := scheduler.New(
		ctx, client, factory, nil,
		profile.NewRecorderFactory(events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})),
		scheduler.WithPercentageOfNodesToScore(&score),
		scheduler.WithParallelism(int32(*threads)),
	)
	if err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	return sched, nil
}

func place(ctx context.Context, sched *scheduler.Scheduler, first, count int) (int, error) {
	logger := klog.FromContext(ctx)
	plugins := sched.Profiles[v1.DefaultSchedulerName]
	snapshot, ok := plugins.SnapshotSharedLister().(*cache.Snapshot)
	if !ok {
		return 0, fmt.Errorf("no snapshot behind %T", plugins.SnapshotSharedLister())
	}
	for number := first; number < first+count; number++ {
		info, err := framework.NewPodInfo(pod(number))
		if err != nil {
			return 0, err
		}
		if err := sched.Cache.UpdateSnapshot(logger, snapshot); err != nil {
			return 0, err
		}
		found, err := sched.SchedulePod(ctx, plugins, framework.NewCycleState(), &framework.QueuedPodInfo{PodInfo: info})
		if err != nil {
			return number - first, err
		}
		assumed := info.Pod.DeepCopy()
		assumed.Spec.NodeName = found.SuggestedHost
		if err := sched.Cache.AssumePod(logger, assumed); err != nil {
			return number - first, err
		}
	}
	return count, nil
}

func node(number int) *v1.Node {
	name := fmt.Sprintf("n%05d", number)
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)},
		Status: v1.NodeStatus{
			Capacity:    resources(*nodeCPU, *nodeMemory, *nodeGPUs, 110),
			Allocatable: resources(*nodeCPU, *nodeMemory, *nodeGPUs, 110),
			Conditions:  []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}},
		},
	}
}

func pod(number int) *v1.Pod {
	name := fmt.Sprintf("p%06d", number)
	wanted := resources(*podCPU, *podMemory, *podGPUs, 0)
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "race", UID: types.UID(name)},
		Spec: v1.PodSpec{
			SchedulerName: v1.DefaultSchedulerName,
			Containers:    []v1.Container{{Name: "c", Image: "i", Resources: v1.ResourceRequirements{Requests: wanted, Limits: wanted}}},
		},
	}
}

func resources(cpuMillis, memoryMiB, gpus, pods int64) v1.ResourceList {
	list := v1.ResourceList{
		v1.ResourceCPU:    *resource.NewMilliQuantity(cpuMillis, resource.DecimalSI),
		v1.ResourceMemory: *resource.NewQuantity(memoryMiB<<20, resource.BinarySI),
	}
	if gpus > 0 {
		list[gpu] = *resource.NewQuantity(gpus, resource.DecimalSI)
	}
	if pods > 0 {
		list[v1.ResourcePods] = *resource.NewQuantity(pods, resource.DecimalSI)
	}
	return list
}

func cpuSeconds() float64 {
	var usage syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &usage) != nil {
		return 0
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}
