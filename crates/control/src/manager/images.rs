//! Files that hold an image in a format of some program's. A volume shows a file's bytes as they are, and nothing boots from such.

use std::{fs::File, os::unix::fs::FileExt, path::Path};

use millrace_services::{Leaf, Node};

/// Where a format has its mark, the mark, and its name.
const MARKS: [(usize, &[u8], &str); 6] = [
    (0, b"QFI\xfb", "qcow2"),
    (0, b"KDMV", "VMDK"),
    (0, b"# Disk DescriptorFile", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VHD"),
    (64, &[0x7f, 0x10, 0xda, 0xbe], "VDI"),
];
/// Bytes from a file's beginning on in which the marks are.
const MARKED: usize = 68;

/// What to tell the operator of a stack's files that are there. To be called before they are opened: those that are made then hold nothing. A
/// guest may have written such a mark to its own first block, and so it is no reason to refuse a file.
pub(super) fn warning(stack: &Node) -> Option<String> {
    let named = |path: &Path| {
        let format = format_of(path)?;
        let path = path.display();
        Some(format!(
            "{path} begins as a {format} image does, and guests see its bytes as they are; if it is one, delete the volume, make a raw image \
             of it (qemu-img convert -O raw {path} {path}.raw), and take that"
        ))
    };
    let found: Vec<_> = stack.leaves().into_iter().filter_map(Leaf::file).filter_map(named).collect();
    (!found.is_empty()).then(|| found.join("; "))
}

fn format_of(path: &Path) -> Option<&'static str> {
    // A pipe would be waited for.
    if !path.metadata().is_ok_and(|found| found.is_file()) {
        return None;
    }
    let mut start = [0; MARKED];
    // Who may not read it is told when it is opened.
    let read = File::open(path).and_then(|file| file.read_at(&mut start, 0)).ok()?;
    let start = start.get(..read)?;
    let is_marked = |(at, mark, _): &&(usize, &[u8], &str)| start.get(*at..).is_some_and(|there| there.starts_with(mark));
    MARKS.iter().find(is_marked).map(|(_, _, format)| *format)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn images_are_known_by_their_marks() {
        let directory = tempfile::tempdir().unwrap();
        for (at, (offset, mark, format)) in MARKS.into_iter().enumerate() {
            let path = directory.path().join(at.to_string());
            fs::write(&path, [vec![0; offset], mark.to_vec()].concat()).unwrap();
            assert_eq!(format_of(&path), Some(format));
            // Cut short within the mark.
            fs::write(&path, [vec![0; offset], mark[..mark.len() - 1].to_vec()].concat()).unwrap();
            assert_eq!(format_of(&path), None);
        }
        let (raw, image) = (directory.path().join("raw"), directory.path().join("image"));
        fs::write(&raw, vec![0; 512]).unwrap();
        fs::write(&image, b"QFI\xfb\0\0\0\x03").unwrap();
        for nothing in [raw.as_path(), &directory.path().join("none"), directory.path()] {
            assert_eq!(format_of(nothing), None, "{}", nothing.display());
        }
        let stack = |text: String| -> Node { text.parse().unwrap() };
        assert_eq!(warning(&stack(format!("file:{}", raw.display()))), None);
        let told = warning(&stack(format!("mirror(file:{}, file:{})", raw.display(), image.display()))).unwrap();
        assert!(told.contains("image begins as a qcow2 image") && told.contains("qemu-img convert -O raw"), "{told}");
    }
}
