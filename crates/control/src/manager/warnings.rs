//! What is told when a volume is made: what its definition does not say, and its owner may not have meant.

use std::{fs::Metadata, path::Path};

use millrace_services::{Leaf, Node, is_key_open_to_all};

use super::images;
use crate::{Size, model::VolumeSpec};

/// Services that come up over memory that was emptied: they keep nothing there, or begin anew.
const COME_UP: [&str; 6] = ["concat", "stripe", "throttle", "meter", "move", "disk"];

/// All of it. To be called before the volume's files are opened: those that are made then hold nothing.
pub(super) fn of(spec: &VolumeSpec) -> Option<String> {
    let mut found: Vec<_> = images::warning(&spec.stack).into_iter().collect();
    found.extend(longer_files(spec));
    let nodes = nodes(&spec.stack);
    found.extend(nodes.iter().copied().filter_map(forgotten_cache));
    found.extend(forgotten(&spec.stack));
    found.extend(nodes.into_iter().filter_map(open_key));
    (!found.is_empty()).then(|| found.join("; "))
}

/// A node, and all below it.
fn nodes(node: &Node) -> Vec<&Node> {
    std::iter::once(node).chain(node.legs().iter().flat_map(nodes)).collect()
}

/// Files that are longer than what the volume has of them: growing does not bring the rest back, it begins with zeroes there.
fn longer_files(spec: &VolumeSpec) -> Vec<String> {
    if spec.read_only {
        return Vec::new();
    }
    let told = |(path, size): (&Path, u64)| {
        let length = path.metadata().ok().filter(Metadata::is_file)?.len();
        let (path, length, size) = (path.display(), Size(length), Size(size));
        (length.0 > size.0).then(|| {
            format!(
                "{path} has {length}, and the volume {size} of it: what lies behind is lost when the volume is resized; if all of it is \
                 meant, delete the volume (the file stays), and make it without a size"
            )
        })
    };
    let leaves = spec.stack.sized_leaves(spec.size.map(|size| size.0), spec.block_size.0).into_iter();
    leaves.filter_map(|(leaf, size)| leaf.file().zip(size)).filter_map(told).collect()
}

/// A cache that keeps in memory what the slow leg does not have yet.
fn forgotten_cache(node: &Node) -> Option<String> {
    let is_back = node.word() == "cache" && node.settings().text("mode") == Some("back");
    let [fast, slow] = node.legs() else { return None };
    let is_in_memory = |leg: &Node| leg.leaves().iter().all(|leaf| leaf.is_memory());
    (is_back && is_in_memory(fast) && !is_in_memory(slow)).then(|| {
        "the cache's fast leg is in memory: what is not written back is lost when the daemon stops, and the volume does not open again; \
         take a file or a disk for it"
            .to_owned()
    })
}

/// A service that is over memory alone.
fn forgotten(stack: &Node) -> Option<String> {
    let node = forgetful(stack, &Leaf::is_memory).into_iter().find(|node| forgotten_cache(node).is_none())?;
    // Elsewhere there may be data.
    let is_all = stack.leaves().into_iter().all(Leaf::is_memory);
    let anew = if is_all { " (delete it, and make it anew)" } else { "" };
    Some(format!(
        "all below {} is in memory: it is lost when the daemon stops, and the volume does not open again{anew}; take files or disks for it if \
         its data count",
        node.word()
    ))
}

/// The services of a stack that miss what they keep when what is in memory is gone.
pub(super) fn forgetful<'a>(stack: &'a Node, in_memory: &dyn Fn(&Leaf) -> bool) -> Vec<&'a Node> {
    let is_lost = |node: &Node| node.leaves().into_iter().all(in_memory);
    let forgets = |node: &&Node| match (node.word(), node.legs()) {
        (_, []) => false,
        ("cache", [fast, _]) => node.settings().text("mode") == Some("back") && is_lost(fast),
        (word, _) => !COME_UP.contains(&word) && is_lost(node),
    };
    nodes(stack).into_iter().filter(forgets).collect()
}

/// A key that others than the daemon's user and group can read.
fn open_key(node: &Node) -> Option<String> {
    let path = Path::new(node.settings().text("key")?.strip_prefix("file:")?);
    let file = path.metadata().ok().filter(Metadata::is_file)?;
    is_key_open_to_all(&file).then(|| {
        let path = path.display();
        format!(
            "everybody on this machine can reach the key file {path}: chmod 600 it; if somebody may have read it, take another key \
             (docs/services/crypt.md)"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File, Permissions},
        os::unix::fs::PermissionsExt,
    };

    use super::*;
    use crate::model::LogicalBlock;

    fn spec(size: Option<u64>, stack: &str) -> VolumeSpec {
        let size = size.map(Size);
        let (name, stack) = ("v".parse().unwrap(), stack.parse().unwrap());
        VolumeSpec { name, size, stack, block_size: LogicalBlock::default(), read_only: false, uuid: None }
    }

    fn file(path: &Path, length: u64) -> String {
        File::create(path).unwrap().set_len(length).unwrap();
        format!("file:{}", path.display())
    }

    #[test]
    fn a_file_that_is_longer_than_its_volume_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let [long, short] =
            [("long", 3 << 20), ("short", 1 << 20)].map(|(name, length)| file(&folder.path().join(name), length));
        let told = of(&spec(Some(1 << 20), &long)).unwrap();
        assert!(told.contains("long has 3M, and the volume 1M of it") && told.contains("without a size"), "{told}");
        let told = of(&spec(Some(3 << 20), &format!("concat({long}(size=2M), {short})"))).unwrap();
        assert!(told.contains("long has 3M, and the volume 2M of it") && !told.contains("short"), "{told}");
        let none = format!("file:{}", folder.path().join("none").display());
        for (size, stack) in [
            (None, long.clone()),
            (Some(3 << 20), long.clone()),
            (Some(4 << 20), long.clone()),
            (Some(4 << 20), format!("throttle(iops=1) | {long}(size=1M)")),
            (Some(1 << 20), none),
            (Some(1 << 20), format!("file:{}", folder.path().display())),
        ] {
            assert_eq!(of(&spec(size, &stack)), None, "{stack}");
        }
        let read_only = VolumeSpec { read_only: true, ..spec(Some(1 << 20), &long) };
        assert_eq!(of(&read_only), None, "nothing resizes it");
    }

    #[test]
    fn a_cache_that_forgets_what_only_it_has_is_told() {
        let told = |stack: &str| of(&spec(Some(1 << 20), stack));
        for fast in ["memory(size=1M)", "stripe(memory(size=1M), memory(size=1M))"] {
            let told = told(&format!("meter | cache(mode=back, {fast}) | file:/none/slow")).unwrap();
            assert!(told.contains("fast leg is in memory"), "{told}");
        }
        for stack in [
            "cache(mode=back, file:/none/fast(size=1M)) | file:/none/slow",
            "cache(mode=through, memory(size=1M)) | file:/none/slow",
        ] {
            assert_eq!(told(stack), None, "{stack}");
        }
    }

    #[test]
    fn a_service_over_memory_alone_is_told() {
        let told = |stack: &str| of(&spec(Some(1 << 20), stack));
        for (stack, service) in [
            ("meter | integrity | memory", "integrity"),
            ("mirror(memory, memory)", "mirror"),
            ("concat(integrity | memory(size=1M), file:/none/a(size=1M))", "integrity"),
            ("cache(mode=back, memory(size=1M)) | memory", "cache"),
        ] {
            let told = told(stack).unwrap();
            assert!(told.contains(&format!("all below {service} is in memory")), "{stack}: {told}");
            assert_eq!(told.contains("delete it"), !stack.contains("file:"), "{stack}: {told}");
        }
        for stack in [
            "memory",
            "throttle(iops=1) | stripe(memory, memory)",
            "integrity | concat(memory(size=1M), file:/none/a(size=1M))",
        ] {
            assert_eq!(told(stack), None, "{stack}");
        }
    }

    #[test]
    fn a_key_that_all_can_reach_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let key = file(&path, 32);
        let told = |mode: u32| {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            of(&spec(Some(1 << 20), &format!("meter | crypt(key={key}) | null")))
        };
        assert!(told(0o644).unwrap().contains("chmod 600 it"));
        assert_eq!(told(0o600), None);
        assert_eq!(told(0o640), None);
        fs::remove_file(&path).unwrap();
        assert_eq!(of(&spec(Some(1 << 20), &format!("crypt(key={key}) | null"))), None);
    }
}
