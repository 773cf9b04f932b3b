//! Virtio disks over vhost-user, beside SPDK's and those of QEMU's storage daemon.

use crate::{
    client::{Lean, Load},
    error::Failure,
    least, machine,
    record::Record,
    subject::{Qemu, Setup, Spdk},
    suite::Suite,
};

/// SPDK's memory in MiB: its volume takes none.
const SPDK_MEMORY: usize = 512;

/// Our lean client, by one split queue with indirect descriptors, as a Linux guest would use, with new addresses and with headers that stay
/// (the client then writes little but indexes); ours by a packed one, too.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let setup = Setup::default().volume("nothing", "null", "1G").virtio("disk", "nothing");
    let (mut subjects, mut client) = (vec![suite.start_ours("spin", &setup)?], "--virtio");
    if let Some(tree) = &suite.spdk {
        match Spdk::start_vhost(tree, &suite.folder("spdk"), suite.target, SPDK_MEMORY)? {
            Some(spdk) => {
                spdk.null("nothing", 1 << 30)?;
                spdk.virtio("disk", "nothing")?;
                subjects.push(Box::new(spdk));
                // It ends at once when the guest's memory is not in huge pages; the suite has set some aside for it.
                client = "--virtio --pages huge";
            }
            None => record.note("SPDK's tree has no vhost target".into()),
        }
    }
    if let Some(in_root) = &suite.in_root {
        subjects.push(Box::new(Qemu::start(in_root, &suite.folder("qsd"), suite.target, "disk", 1 << 30)?));
    }
    let devices = ["disk".to_owned()];
    let depths: &[u32] = if suite.quick { &[1, 32] } else { &[1, 4, 32, 128] };
    let mut cases = Vec::new();
    for &depth in depths {
        cases.extend(suite.on_each(&subjects, "lean", &Lean::with(client), &Load::randread(depth), &devices));
        let still = Lean::with(&format!("{client} --still"));
        cases.extend(suite.on_each(&subjects, "still", &still, &Load::randread(depth), &devices));
        // QEMU's storage daemon has no packed rings.
        let packed = Lean::with(&format!("{client} --packed"));
        cases.extend(suite.on_each(&subjects[..1], "packed", &packed, &Load::randread(depth), &devices));
    }
    record.note("qsd: qemu-storage-daemon, vhost-user-blk over null-co, with an I/O thread on the target's core".into());
    suite.measure(record, &mut subjects, &cases)?;
    subjects.clear();
    least::add(suite, record, least::Kind::Virtio);
    record.save(&machine::now())
}
