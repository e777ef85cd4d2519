"""Style and script of an array's page fragment. The script reads numbers and texts, and writes them as text only."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

_LIGHT = "--mpa-f0:#1b1f24;--mpa-b0:#fff;--mpa-d:#57606a;--mpa-l:#d0d7de;--mpa-c:#f6f8fa;--mpa-a:#0969da"
_DARK = "--mpa-f0:#e6e9ed;--mpa-b0:#15181c;--mpa-d:#9aa5b1;--mpa-l:#3a424b;--mpa-c:#1f252b;--mpa-a:#6cb6ff"

STYLE = (
    f".mpa{{{_LIGHT}}}@media(prefers-color-scheme:dark){{.mpa{{{_DARK}}}}}"
    f"body[data-jp-theme-light=true] .mpa,body.vscode-light .mpa{{{_LIGHT}}}"
    f"body[data-jp-theme-light=false] .mpa,body.vscode-dark .mpa,body.vscode-high-contrast .mpa{{{_DARK}}}"
    """
.mpa{--mpa-f:var(--jp-content-font-color1,var(--vscode-editor-foreground,var(--mpa-f0)));
background:var(--jp-layout-color0,var(--vscode-editor-background,var(--mpa-b0)));color:var(--mpa-f);
font:13px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif;padding:6px 2px;position:relative}
.mpa [hidden]{display:none!important}.mpa .mpa-s:empty{display:none}
.mpa .mpa-h{margin:0 0 8px}.mpa .mpa-h b{font-weight:600;font-size:14px;margin-right:8px}
.mpa .mpa-d,.mpa .mpa-h span{color:var(--mpa-d)}.mpa .mpa-h span{margin-right:8px}
.mpa .mpa-o{overflow-x:auto;padding-bottom:2px}
.mpa .mpa-p{position:relative;width:var(--w);height:var(--h);font-size:11px;line-height:14px}
.mpa .mpa-p>*{position:absolute;display:block;white-space:nowrap}
.mpa .mpa-p img{max-width:none;image-rendering:pixelated;margin:0;display:block}
.mpa .mpa-x{overflow:hidden;text-overflow:ellipsis;color:var(--mpa-d)}
.mpa .mpa-n{color:var(--mpa-f)}
.mpa .mpa-v{writing-mode:vertical-rl;text-overflow:ellipsis;overflow:hidden;color:var(--mpa-d)}
.mpa .mpa-p svg{font:10px system-ui,sans-serif;pointer-events:none;overflow:visible}.mpa svg text{fill:#101418;text-anchor:middle}
.mpa .mpa-k{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center;margin:8px 0 0;font-size:12px}
.mpa .mpa-k>span{display:inline-flex;align-items:center;gap:6px}
.mpa .mpa-k img,.mpa .mpa-k i{width:14px;height:14px;margin:0;flex:none;image-rendering:pixelated;border-radius:2px;
box-shadow:0 0 0 1px var(--mpa-l)}
.mpa .mpa-k .mpa-r{width:150px;height:11px}
.mpa p{margin:6px 0 0;font-size:12px;color:var(--mpa-d);max-width:76ch}
.mpa .mpa-s{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 8px}.mpa .mpa-s label{display:inline-flex;gap:8px;align-items:center}
.mpa .mpa-s input{accent-color:var(--mpa-a);width:150px}
.mpa details{margin:6px 0 0;font-size:12px}.mpa summary{cursor:pointer;color:var(--mpa-d);width:max-content}
.mpa .mpa-t{overflow:auto;max-height:320px;margin-top:6px;border:1px solid var(--mpa-l);border-radius:4px}
.mpa .mpa-t:focus-visible,.mpa .mpa-o:focus-visible,.mpa summary:focus-visible{outline:2px solid var(--mpa-a);outline-offset:1px}
.mpa table{border-collapse:collapse;margin:0;font-size:11.5px;font-variant-numeric:tabular-nums;color:var(--mpa-f)}
.mpa .mpa-t tr,.mpa .mpa-t tr:nth-child(odd){background:none}
.mpa .mpa-t th,.mpa .mpa-t td{padding:2px 8px;text-align:right;white-space:nowrap;border:0;border-bottom:1px solid var(--mpa-l);
max-width:none;background:none}.mpa .mpa-t th{font-weight:600;color:var(--mpa-d)}.mpa .mpa-t .mpa-g{text-align:left;color:var(--mpa-f)}
.mpa .mpa-tip{position:absolute;width:max-content;max-width:260px;z-index:9;pointer-events:none;background:var(--mpa-c);
color:var(--mpa-f0);border:1px solid var(--mpa-l);border-radius:6px;padding:5px 8px;font-size:12px;line-height:1.4;
box-shadow:0 2px 8px rgba(0,0,0,.25);overflow-wrap:anywhere}
.mpa .mpa-tip b{font:600 12.5px ui-monospace,monospace}.mpa .mpa-tip span{color:var(--mpa-d)}
.mpa .mpa-p .mpa-cur{box-sizing:border-box;border:2px solid var(--mpa-a);outline:1px solid var(--mpa-b0);pointer-events:none}
"""
).replace("\n", "")

SCRIPT = """(function(){
function add(p,c,t,k){var e=document.createElement(c);if(t!==undefined)e.textContent=t;if(k)e.className=k;p.appendChild(e);return e}
function short(v,m,l){if(v!==v)return'NaN';if(v===Infinity)return'+Inf';if(v===-Infinity)return'\\u2212Inf';
if(v===0)return 1/v<0?'-0':'0';var e=Math.max(Math.floor(Math.log2(Math.abs(v))),l),u=Math.pow(2,e-m)/2,p,s;
if(Math.abs(v)===Math.pow(2,e))u/=2;for(p=1;p<18;p++){s=v.toPrecision(p);if(Math.abs(s-v)<u)return String(+s)}return String(v)}
function half(h){var s=h&32768?-1:1,e=h>>10&31,f=h&1023;
return s*(e===0?f*Math.pow(2,-24):e===31?(f?NaN:Infinity):(1+f/1024)*Math.pow(2,e-15))}
function pair(a,b,m,l){var t=short(b,m,l);return short(a,m,l)+(/^[-\\u2212+]/.test(t)?'':'+')+t+'j'}
function bytes(b){return Uint8Array.from(atob(b||''),function(c){return c.charCodeAt(0)})}
document.querySelectorAll('.mpa[data-mpa]').forEach(function(el){
var d=JSON.parse(el.getAttribute('data-mpa'));el.removeAttribute('data-mpa');
var w=new DataView(bytes(d.v).buffer),n=+d.t.slice(1),gone=bytes(d.m),A=d.a,S=A.length-4,X=A[S+3],Y=A[S+2],frame=0;
var q=function(s){return el.querySelector(s)},qa=function(s){return Array.from(el.querySelectorAll(s))};
var pic=q('.mpa-p'),tip=add(el,'div',undefined,'mpa-tip'),cur=add(pic,'div',undefined,'mpa-cur'),inputs=[],
F=d.i?[q('.mpa-f').src].concat(d.i):[];
tip.hidden=cur.hidden=true;
function num(k){var o=k*n;switch(d.t){case'f8':return w.getFloat64(o,true);case'f4':return w.getFloat32(o,true);
case'f2':return half(w.getUint16(o,true));case'i8':return w.getBigInt64(o,true);case'u8':return w.getBigUint64(o,true);
case'i4':return w.getInt32(o,true);case'u4':return w.getUint32(o,true);case'i2':return w.getInt16(o,true);
case'u2':return w.getUint16(o,true);case'i1':return w.getInt8(o);case'c8':return pair(w.getFloat32(o,true),w.getFloat32(o+4,true),23,-126);
case'c16':return pair(w.getFloat64(o,true),w.getFloat64(o+8,true),52,-1022);default:return w.getUint8(o)}}
function text(k){if(gone.length&&gone[k>>3]>>(k&7)&1)return d.q;var v=num(k);if(d.s)return d.s[v];if(d.t==='b1')return v?'True':'False';
return d.t==='f4'?short(v,23,-126):d.t==='f2'?short(v,10,-14):d.t==='f8'?short(v,52,-1022):String(v)}
function index(a,j){return j<a.h?j:a.s-a.k+j}
function name(a,j){var i=String(index(a,j));if(a.c)i+=' ('+a.c[j]+')';return i}
function flat(r,c,y,x){return(((frame*A[S].k+r)*A[S+1].k+c)*Y.k+y)*X.k+x}
function off(a,j){return j*d.p+(j>=a.h&&a.k<a.s?d.g:0)}
function hit(a,p){var t=a.h*d.p;if(p<0)return-1;if(p<t)return Math.floor(p/d.p);if(a.k===a.s)return-1;
p-=d.g;return p<t?-1:p<a.k*d.p?Math.floor(p/d.p):-1}
function where(){var f=frame,out=[];for(var s=S-1;s>=0;s--){out[s]=f%A[s].k;f=Math.floor(f/A[s].k)}return out}
function show(t,y,x,image){var k=flat(t[2],t[3],y,x),v=num(k),at=where().concat([t[2],t[3],y,x]);tip.textContent='';
var b=add(tip,'b',text(k));b.dir='auto';
if(d.l&&!d.s&&!(gone.length&&gone[k>>3]>>(k&7)&1)){if(v>d.l[1]&&v!==Infinity)add(tip,'span',' above the limits');
if(v<d.l[0]&&v!==-Infinity)add(tip,'span',' below the limits')}
A.forEach(function(a,i){if(!a.n)return;var e=add(tip,'div');add(e,'bdi',a.n);add(e,'span',' ');add(e,'bdi',name(a,at[i]));
if(a.w){add(e,'span',' \u201c');add(e,'bdi',a.w[at[i]]);add(e,'span','\u201d')}});
var l=image.offsetLeft+t[0]+off(X,x),u=image.offsetTop+t[1]+off(Y,y);tip.hidden=cur.hidden=false;
cur.style.cssText='left:'+(l-2)+'px;top:'+(u-2)+'px;width:'+(d.p+4)+'px;height:'+(d.p+4)+'px';
var a=cur.getBoundingClientRect(),o=el.getBoundingClientRect(),m=tip.offsetWidth,h=tip.offsetHeight;l=a.left-o.left;u=a.top-o.top;
tip.style.left=(l+a.width+m+6>el.clientWidth&&l>m?l-m-4:l+a.width+4)+'px';
tip.style.top=(u+a.height+h+6>el.clientHeight&&u>h?u-h-2:u+a.height+2)+'px'}
function leave(){tip.hidden=cur.hidden=true}
function move(e){var image=q('.mpa-f'),b=image.getBoundingClientRect(),px=e.clientX-b.left,py=e.clientY-b.top;
for(var i=0;i<d.f.length;i++){var t=d.f[i],x=hit(X,px-t[0]),y=hit(Y,py-t[1]);if(x>=0&&y>=0){show(t,y,x,image);return}}leave()}
if(pic){pic.addEventListener('pointermove',move);pic.addEventListener('pointerdown',move);pic.addEventListener('pointerleave',leave)}
var box=q('.mpa-t'),fold=q('details');
function label(a,j){return a.w?a.w[j]:a.c?a.c[j]:String(index(a,j))}
function table(){box.textContent='';var t=add(box,'table'),h=add(add(t,'thead'),'tr'),j;add(h,'td',d.k);
function head(r,s,a,j){var e=add(r,'th');e.scope=s;add(e,'bdi',label(a,j))}
for(j=0;j<X.k;j++)head(h,'col',X,j);
d.f.forEach(function(f){var g=add(t,'tbody'),r,e,y,x;if(d.f.length>1){
e=add(add(g,'tr'),'th',undefined,'mpa-g');e.colSpan=X.k+1;e.scope='rowgroup';
[[A[S],f[2]],[A[S+1],f[3]]].forEach(function(p){if(p[0].n){
add(e,'bdi',p[0].n);add(e,'span',' ');add(e,'bdi',label(p[0],p[1]));add(e,'span',' ')}})}
for(y=0;y<Y.k;y++){r=add(g,'tr');head(r,'row',Y,y);for(x=0;x<X.k;x++){e=add(add(r,'td'),'bdi',text(flat(f[2],f[3],y,x)))}}})}
if(fold)fold.addEventListener('toggle',function(){if(fold.open&&d.f.length)table()});
function slide(){frame=0;inputs.forEach(function(i,s){frame=frame*A[s].k+ +i.value;
i.nextElementSibling.textContent=name(A[s],+i.value)+(A[s].w?' '+A[s].w[+i.value]:'')});
q('.mpa-f').src=F[frame];leave();if(fold&&fold.open)table()}
if(S){A.slice(0,S).forEach(function(a){var l=add(q('.mpa-s'),'label'),i;add(l,'bdi',a.n);i=add(l,'input');i.type='range';i.min=0;
i.max=a.k-1;i.value=0;add(l,'output');i.addEventListener('input',slide);inputs.push(i)});q('.mpa-w').hidden=true;slide()}
})})()"""
