//! Published test vectors, another implementation as an oracle, and what keys and their sources do.

use aes::{Aes256, cipher::KeyInit as _};
use millrace_memory::{Mapping, Reach, Segment, Target};
use proptest::prelude::*;
use xts_mode::Xts128;

use crate::*;

mod sources;

/// Memory of a test's own; segments of it do not outlive it.
struct Memory(Mapping);

impl Memory {
    fn of(bytes: &[u8]) -> Self {
        let memory = Self(Mapping::anonymous(bytes.len()).unwrap());
        memory.all().write_at(0, bytes);
        memory
    }

    fn all(&self) -> Segment {
        // SAFETY: the tests drop their segments before the memory.
        unsafe { self.0.segment(0, self.0.len()) }.unwrap()
    }

    fn part(&self, offset: usize, len: usize) -> Segment {
        self.all().part(offset, len).unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.0.len()];
        self.all().read_at(0, &mut bytes);
        bytes
    }
}

fn near(segment: Segment) -> Reach<'static> {
    Reach { segment: segment.into(), target: Target::Near }
}

fn hex<const N: usize>(digits: &str) -> [u8; N] {
    assert_eq!(digits.len(), 2 * N);
    std::array::from_fn(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap())
}

fn secret<const N: usize>(digits: &str) -> Secret<N> {
    Secret::copy_of(&hex(digits)).unwrap()
}

/// IEEE 1619-2007, annex B, vector 10.
#[test]
fn xts_gives_the_standards_ciphertext() {
    let key = concat!(
        "2718281828459045235360287471352662497757247093699959574966967627",
        "3141592653589793238462643383279502884197169399375105820974944592"
    );
    for xts in Xts::all(&secret(key)).unwrap() {
        let plain: Vec<u8> = (0..512_u32).map(|at| at as u8).collect();
        let memory = Memory::of(&plain);
        xts.encrypt(0xff, 512, memory.all().into(), near(memory.all()));
        let cipher = memory.bytes();
        assert_eq!(cipher[..32], hex::<32>("1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b"));
        assert_eq!(cipher[32..64], hex::<32>("5d31e276f8fe4a8d66b317f9ac683f44680a86ac35adfc3345befecb4bb188fd"));
        xts.decrypt(0xff, 512, memory.all().into(), memory.all().into());
        assert_eq!(memory.bytes(), plain);
    }
}

/// With registers of each width that the processor has; and the library with itself.
#[test]
fn xts_is_the_librarys_at_every_size_and_place() {
    let all = Xts::all(&Secret::<64>::generate().unwrap()).unwrap();
    for ours in &all {
        is_the_same_at_every_size_and_place(ours, &all[0]);
    }
}

fn is_the_same_at_every_size_and_place(ours: &Xts, library: &Xts) {
    const MOST: usize = 17 * 4096;
    let plain: Vec<u8> = (0..MOST + 64).map(|at| ((at * 31) ^ (at >> 8)) as u8).collect();
    let (from, to) = (Memory::of(&plain), [0, 0, 0].map(|byte| Memory::of(&vec![byte; MOST + 128])));
    for (unit, units, off) in [512, 1536, 4096]
        .iter()
        .flat_map(|unit| (1..=17).flat_map(move |units| (0..64).step_by(7).map(move |off| (*unit, units, off))))
    {
        let (len, first) = (unit * units, u64::MAX - 20 - off as u64 * 977);
        let [one, two, three] = [0, 1, 2].map(|at| to[at].part([off * 9 % 64, 0, off][at], len));
        for to in &to {
            to.all().fill(0);
        }
        ours.encrypt(first, unit, from.part(off, len).into(), near(one));
        ours.encrypt(first, unit, from.part(off, len).into(), Reach { segment: two.into(), target: Target::Far });
        library.encrypt(first, unit, from.part(off, len).into(), near(three));
        assert!(one.equals(&three) && two.equals(&three), "{units} units of {unit} bytes, {off} bytes behind a line");
        // One after the other: what comes next is told, and is not what was told.
        let mut run = ours.run();
        for (number, next) in [(5, Some(first)), (first, Some(first ^ 1)), (first, None)] {
            two.fill(0);
            run.encrypt(number, unit, from.part(off, len).into(), near(two), next);
            assert_eq!(two.equals(&three), number == first, "{units} units of {unit} bytes in a run");
        }
        assert!(!one.equals(&from.part(off, len)));
        let written = to.each_ref().map(|to| to.bytes().iter().rposition(|byte| *byte != 0).unwrap());
        assert!(written[1] < len && written[0] < off * 9 % 64 + len, "nothing behind the last unit");
        // The other way as well; what was made for the one way is not taken for the other.
        run.encrypt(5, unit, from.part(off, len).into(), near(two), Some(first));
        for (number, next) in [(first, Some(first)), (first, Some(first ^ 1)), (first, None)] {
            two.fill(0);
            run.decrypt(number, unit, one.into(), two.into(), next);
            assert!(two.equals(&from.part(off, len)), "{units} units of {unit} bytes back in a run");
        }
        // Longer than what was told of.
        two.fill(0);
        run.decrypt(first, unit, one.part(0, unit).unwrap().into(), two.part(0, unit).unwrap().into(), Some(first));
        run.decrypt(first, unit, one.into(), two.into(), None);
        assert!(two.equals(&from.part(off, len)), "{units} units of {unit} bytes after one");
        two.fill(0);
        ours.decrypt(first, unit, one.into(), two.into());
        library.decrypt(first, unit, one.into(), three.into());
        ours.decrypt(first, unit, one.into(), one.into());
        assert!([one, two, three].iter().all(|to| to.equals(&from.part(off, len))), "{units} units of {unit} bytes");
    }
}

#[test]
fn another_key_takes_over_in_place() {
    let keys = [0, 1].map(|_| Secret::<64>::generate().unwrap());
    let ciphers = || keys.each_ref().map(|key| Xts::new(key.again().unwrap()).unwrap());
    let ([old, new], plain) = (ciphers(), vec![0x5a; 20 * 512]);
    let memory = Memory::of(&plain);
    old.encrypt(7, 512, memory.all().into(), near(memory.all()));
    let mut data = memory.bytes();
    old.change_key(&new, 7, 512, &mut data);
    let changed = Memory::of(&data);
    new.decrypt(7, 512, changed.all().into(), changed.all().into());
    assert_eq!(changed.bytes(), plain);
}

/// The GCM specification's test case 14.
#[test]
fn gcm_gives_the_specifications_ciphertext() {
    let aead = Aead::new(&secret(&"00".repeat(32))).unwrap();
    let memory = Memory::of(&[0; 16]);
    let tag = aead.seal(&[0; 12], &[], memory.all(), memory.all());
    assert_eq!(memory.bytes(), hex::<16>("cea7403d4d606b6e074ec5d3baf39d18"));
    assert_eq!(tag, hex("d0d1c8a799996bf0265b98b5d48ab919"));
}

/// RFC 8452, appendix C.2.
#[test]
fn gcm_siv_opens_what_the_rfc_sealed() {
    let key = secret(&format!("01{}", "00".repeat(31)));
    let sealed: [u8; 36] = hex("030000000000000000000000c2ef328e5c71c83b843122130f7364b761e0b97427e3df28");
    let opened: Secret<8> = open(&key, &[], &sealed).unwrap();
    assert_eq!(opened.bytes(), &hex("0100000000000000"));
}

proptest! {
    #[test]
    fn xts_agrees_with_another_implementation(
        key: [u8; 32], tweak: [u8; 32], first in 0..u64::MAX - 16, small: bool, units in 1_usize..12, seed: u8,
    ) {
        prop_assume!(key != tweak);
        let unit = if small { 512 } else { 4096 };
        let plain: Vec<u8> = (0..unit * units).map(|at| (at as u8).wrapping_mul(seed) ^ (at >> 8) as u8).collect();
        let both: Vec<u8> = [key, tweak].concat();
        let all = Xts::all(&Secret::copy_of(&both.try_into().unwrap()).unwrap()).unwrap();
        let oracle = Xts128::new(Aes256::new(&key.into()), Aes256::new(&tweak.into()));
        let mut expected = plain.clone();
        oracle.encrypt_area(&mut expected, unit, u128::from(first), u128::to_le_bytes);
        for xts in all {
            let (source, target) = (Memory::of(&plain), Memory::of(&vec![0; plain.len()]));
            xts.encrypt(first, unit, source.all().into(), near(target.all()));
            prop_assert_eq!(&target.bytes(), &expected);
            prop_assert_eq!(&source.bytes(), &plain);
            xts.decrypt(first, unit, target.all().into(), target.all().into());
            prop_assert_eq!(&target.bytes(), &plain);
        }
    }

    #[test]
    fn aead_notices_every_bit(key: [u8; 32], nonce: [u8; 12], extra: [u8; 24], at in 0_usize..(512 + 16 + 24) * 8) {
        let aead = Aead::new(&Secret::copy_of(&key).unwrap()).unwrap();
        let plain: Vec<u8> = (0..512_u32).map(|at| at as u8).collect();
        let (sealed, out) = (Memory::of(&plain), Memory::of(&[0; 512]));
        let tag = aead.seal(&nonce, &extra, sealed.all(), sealed.all());
        aead.open(&nonce, &extra, &tag, sealed.all(), out.all()).unwrap();
        prop_assert_eq!(out.bytes(), plain);
        let mut all = [sealed.bytes(), tag.to_vec(), extra.to_vec()].concat();
        all[at / 8] ^= 1 << (at % 8);
        let spoiled = Memory::of(&all[..512]);
        let (tag, extra) = (all[512..528].try_into().unwrap(), &all[528..]);
        let refused = aead.open(&nonce, extra, &tag, spoiled.all(), out.all());
        prop_assert!(matches!(refused, Err(CipherError::Authentication)));
    }

    #[test]
    fn sealed_blocks_and_codes_notice_every_bit(key: [u8; 32], nonce: [u8; 12], extra: [u8; 32], at in 0_usize..(512 + 16 + 32) * 8) {
        let (one, two): (Vec<u8>, Vec<u8>) = (key.to_vec(), key.iter().map(|byte| !byte).collect());
        let sealer = Sealer::new(&Secret::copy_of(&[one, two].concat().try_into().unwrap()).unwrap()).unwrap();
        let plain: Vec<u8> = (0..512_u32).map(|at| at as u8).collect();
        let sealed = Memory::of(&plain);
        let tag = sealer.seal(&nonce, &extra, sealed.all());
        prop_assert_ne!(sealed.bytes(), &plain[..]);
        let mut all = [sealed.bytes(), tag.to_vec(), extra.to_vec()].concat();
        sealer.open(&nonce, &extra, &tag, sealed.all()).unwrap();
        prop_assert_eq!(sealed.bytes(), &plain[..]);
        let code = sealer.code(&nonce, &plain);
        prop_assert!(sealer.is_code(&nonce, &plain, &code));
        prop_assert!(code != tag && !sealer.is_code(&nonce.map(|byte| !byte), &plain, &code));
        let mut other = plain;
        other[at / 8 % 512] ^= 1 << (at % 8);
        prop_assert!(!sealer.is_code(&nonce, &other, &code));
        all[at / 8] ^= 1 << (at % 8);
        let spoiled = Memory::of(&all[..512]);
        let (tag, extra) = (all[512..528].try_into().unwrap(), &all[528..]);
        let refused = sealer.open(&nonce, extra, &tag, spoiled.all());
        prop_assert!(matches!(refused, Err(CipherError::Authentication)));
    }

    #[test]
    fn a_sealed_key_opens_with_its_own_key_only(at in 0_usize..92 * 8) {
        let (key, other, volume) = (Secret::generate().unwrap(), Secret::generate().unwrap(), Secret::<64>::generate().unwrap());
        let sealed = seal(&key, b"volume", &volume).unwrap();
        let opened = open::<64>(&key, b"volume", &sealed).unwrap();
        prop_assert_eq!(opened.bytes(), volume.bytes());
        prop_assert!(!sealed.windows(8).any(|window| window == &volume.bytes()[..8]));
        prop_assert!(open::<64>(&other, b"volume", &sealed).is_err());
        prop_assert!(open::<64>(&key, b"another", &sealed).is_err());
        prop_assert!(open::<32>(&key, b"volume", &sealed).is_err());
        let mut spoiled = sealed;
        spoiled[at / 8] ^= 1 << (at % 8);
        prop_assert!(open::<64>(&key, b"volume", &spoiled).is_err());
    }
}

#[test]
fn threads_share_a_cipher() {
    for xts in Xts::all(&Secret::generate().unwrap()).unwrap() {
        share(xts);
    }
}

fn share(xts: Xts) {
    let xts = std::sync::Arc::new(xts);
    let threads: Vec<_> = (0..8_u64)
        .map(|number| {
            let xts = std::sync::Arc::clone(&xts);
            std::thread::spawn(move || {
                // Some have a place of their own, some share one.
                let _own = (number % 2 == 0).then(millrace_block::ShardSlot::claim);
                for round in 0..200 {
                    let plain = vec![number as u8; 4096];
                    let memory = Memory::of(&plain);
                    xts.encrypt(number << 32 | round, 512, memory.all().into(), near(memory.all()));
                    assert_ne!(memory.bytes(), plain);
                    xts.decrypt(number << 32 | round, 512, memory.all().into(), memory.all().into());
                    assert_eq!(memory.bytes(), plain);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_shard_without_memory_for_its_contexts_is_served_all_the_same() {
    let key = Secret::<64>::generate().unwrap();
    let (xts, plain) = (Xts::all(&key).unwrap().swap_remove(0), [0x5a; 4096]);
    let other = Memory::of(&plain);
    Xts::all(&key).unwrap()[0].encrypt(7, 512, other.all().into(), near(other.all()));
    let _own = millrace_block::ShardSlot::claim();
    // Without memory, and when there is some again.
    for pieces in [0, 1, u32::MAX] {
        crate::arena::limit::set(pieces);
        for _ in 0..1500 {
            let memory = Memory::of(&plain);
            xts.encrypt(7, 512, memory.all().into(), near(memory.all()));
            assert_eq!(memory.bytes(), other.bytes());
            xts.decrypt(7, 512, memory.all().into(), memory.all().into());
            assert_eq!(memory.bytes(), plain);
        }
    }
}

#[test]
fn a_cipher_without_memory_blames_no_key() {
    let key = Secret::<64>::generate().unwrap();
    for pieces in 0.. {
        crate::arena::limit::set(pieces);
        let made = Xts::all(&key);
        crate::arena::limit::set(u32::MAX);
        let Err(error) = made else {
            assert!(pieces > 0, "nothing came from the arena");
            break;
        };
        assert!(matches!(error, CipherError::Memory(_)), "{pieces} pieces: {error}");
    }
}

#[test]
fn weak_keys_are_refused_and_secrets_are_not_shown() {
    assert!(matches!(Xts::new(secret(&"ab".repeat(64))), Err(CipherError::WeakKey)));
    let key = Secret::<64>::generate().unwrap();
    let xts = Xts::new(key).unwrap();
    assert_eq!(format!("{xts:?}"), "Xts { key: Secret(64 bytes), .. }");
}
